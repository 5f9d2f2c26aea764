import json

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file

from rollart_core.config.model import NewModel
from rollart_core.errors import ConfigError
from rollart_core.models.new import new_model, random_weights, train_tokenizer
from rollart_core.models.tokenizer import load_tokenizer

PAGE = """Instruction: find a light blue shirt, size 12, for less than $40.99 [SEP] Back
[light blue]
[navy-blue][12 oz] [b07x1]"""
TEXTS = [PAGE] * 20 + ["click[light blue]", "search[blue shirt]", "é漢"]
SMALL = NewModel(num_layers=1, width=16, num_heads=2, head_dim=8, ffn_width=32, vocab_size=320)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 500)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "value", ["light blue", "12", "b07x1", "40.99", "navy-blue", "12 oz", "é漢"]
)
def test_a_value_has_the_same_tokens_wherever_it_stands(tokenizer, value):
    alone = ids(tokenizer, value)
    for before, after in [
        ("click[", "]"),
        ("a ", " b"),
        ("x\n", "\n"),
        ("$", "."),
        ("[SEP] ", ","),
    ]:
        whole = ids(tokenizer, before + value + after)
        found = [whole[i : i + len(alone)] for i in range(len(whole))]
        assert alone in found, (before, after)


def test_brackets_stand_alone_and_digits_are_single(tokenizer):
    pieces = [tokenizer.decode([i]) for i in ids(tokenizer, "[light blue]\n[12]")]
    assert pieces == ["[", "light", "blue", "]", "\n", "[", "1", "2", "]"]


def test_frequent_words_and_tags_are_one_token(tokenizer):
    assert len(ids(tokenizer, "a light blue shirt")) == 4
    assert len(ids(tokenizer, "$40.99 [SEP] Back")) == 8


def test_the_folder_holds_a_whole_model(tmp_path):
    folder = new_model(tmp_path / "m", SMALL, TEXTS, 0)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (320, 16)
    assert config["vocab_size"] == 320
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_token_ids == (config["eos_token_id"],)
    assert tokenizer.template.is_plain


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_tokenizer(new_model(tmp_path_factory.mktemp("m"), SMALL, TEXTS, 0))


def test_ascii_text_of_known_pieces_does_not_go_the_slow_way(loaded, monkeypatch):
    loaded.encode("a red [4]4 shirt<|user|>")
    calls = []
    monkeypatch.setattr(loaded._encode, "_encode", lambda text: calls.append(text) or [])
    loaded.encode("<|user|>a red red [4]4 shirt")
    assert calls == []


def test_rows_of_the_embedding_are_padded_to_64(tmp_path):
    folder = new_model(tmp_path, SMALL.model_copy(update={"vocab_size": 330}), TEXTS, 0)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 384


def test_the_default_has_about_700_thousand_parameters():
    weights = random_weights(NewModel(), 1024, 0)
    assert 0.65e6 < sum(w.size for w in weights.values()) < 0.8e6
    assert all(np.isfinite(w).all() for w in weights.values())


def test_a_vocabulary_without_capacity_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size: 100 given"):
        new_model(tmp_path, SMALL.model_copy(update={"vocab_size": 100}), TEXTS, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "must be a multiple of num_kv_heads"),
        ({"head_dim": 7}, "multiple of 2"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        NewModel(**{**SMALL.model_dump(), **change})
