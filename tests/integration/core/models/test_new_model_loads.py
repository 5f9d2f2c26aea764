"""A model from nothing, as transformers sees it."""

import pytest

from rollart_core.config.model import NewModel
from rollart_core.models.new import CHAT_TEMPLATE, new_model
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.types import Message

TEXTS = ["a red shirt, [red] [large] for $40.99 [SEP] Back", "click[red]"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = NewModel(num_layers=2, width=32, head_dim=16, ffn_width=64, vocab_size=330)
    return new_model(tmp_path_factory.mktemp("model"), spec, TEXTS, 0)


def test_the_weights_fit_the_architecture(folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 10000.0


def test_first_guesses_are_nearly_uniform(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 69).view(2, 32)
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - torch.tensor(float(model.config.vocab_size)).log().item()) < 0.5


def test_transformers_and_we_agree_on_tokens_and_rendering(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    talk = [
        Message(role="system", content="be brief"),
        Message(role="user", content="a red  shirt\n[red]"),
        Message(role="assistant", content="click[red]"),
        Message(role="user", content="é漢 $4"),
    ]
    text = ours.render(talk, add_generation_prompt=True)
    assert theirs.chat_template == CHAT_TEMPLATE
    assert theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == text
    ids = ours.encode(text)
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(ids) == ours.decode(ids) == text
    assert (theirs.eos_token_id,) == ours.stop_token_ids


def test_a_tokenizer_only_transformers_can_read_is_loaded_through_it(folder, tmp_path):
    import json

    vocab = {"<|pad|>": 0, "a": 1, "b": 2, "ab": 3, "<|end|>": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abb<|end|>") == [3, 2, 4]
    assert tokenizer.decode([3, 2, 4], skip_special_tokens=True) == "abb"
    assert tokenizer.stop_token_ids == (4,)
