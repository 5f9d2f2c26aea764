"""A learned reward model: small random classifiers of transformers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.small_models import SMALL, save_model

from rollart_core.errors import ConfigError
from rollart_rewards import reward_model
from rollart_rewards.examples import asked
from rollart_rewards.reward_model import RewardModel
from rollart_testing import assert_checks, check_reward

pytestmark = pytest.mark.timeout(600)
WORDS = ["<pad>", "<unk>", "user", "assistant", ":", "?", "good", "bad", "very"]


def save_classifier(folder: Path, **changes: Any) -> str:
    """Write a small random classifier and a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Punctuation, Sequence, WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    fields = {**SMALL, "head_dim": 16, "num_labels": 1, "pad_token_id": 0, **changes}
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(Qwen3Config(**fields))
    model.score.weight.data.mul_(50)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Sequence([WhitespaceSplit(), Punctuation()])
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


SAID = ("good", "bad", "very good", "very very bad", "good good good good")


def test_one_by_one_or_together_the_values_are_the_same(folder: str) -> None:
    import torch

    alone = RewardModel(model=folder, max_batch=1)
    values = [alone.score(asked(text)).value for text in SAID]
    assert all(0 < value < 1 for value in values)
    assert max(values) - min(values) > 0.01
    model = alone._classifier.model  # type: ignore[union-attr]
    ids = [WORDS.index(w) for w in ["user", ":", "?", "assistant", ":", "very", "good"]]
    wanted = torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]).detach()
    assert values[2] == pytest.approx(wanted.item(), abs=1e-5)

    together = RewardModel(model=folder, max_batch=4)
    start = threading.Barrier(len(SAID))
    sizes = []

    def score(text: str) -> float:
        start.wait(60)
        return together.score(asked(text)).value

    together.score(asked("good"))
    outputs = together._classifier.outputs  # type: ignore[union-attr]
    together._classifier.outputs = lambda talks: sizes.append(len(talks)) or outputs(talks)  # type: ignore
    together._turn.acquire()  # so that all of them wait
    with ThreadPoolExecutor(len(SAID)) as pool:
        found = [pool.submit(score, text) for text in SAID]
        while len(together._waiting) < len(SAID):
            threading.Event().wait(0.01)
        together._turn.release()
        assert [f.result(60) for f in found] == pytest.approx(values, abs=1e-5)
    assert sorted(sizes) == [1, 4]


def test_center_scale_label_and_the_end_of_a_long_talk(folder: str, tmp_path: Path) -> None:
    raw = RewardModel(model=folder).score(asked("good")).components["output"]
    assert RewardModel(model=folder, center=raw).score(asked("good")).value == 0.5
    assert RewardModel(model=folder, scale=1e9).score(asked("good")).value == pytest.approx(0.5)
    assert RewardModel(model=folder, center=1e6).score(asked("good")).value == 0.0
    short = RewardModel(model=folder, max_tokens=3)
    assert short.score(asked("bad " * 600 + "very very good")) == short.score(
        asked("very very good")
    )
    two = save_classifier(tmp_path / "two", num_labels=2, pad_token_id=None)
    values = [RewardModel(model=two, label=n).score(asked("good")).value for n in (0, 1)]
    assert sum(values) == pytest.approx(1.0)
    assert values[0] != pytest.approx(0.5, abs=1e-3)


def test_it_keeps_its_contract(folder: str) -> None:
    assert_checks(check_reward(RewardModel(model=folder)))


def test_what_is_no_reward_model_is_no_zero(folder: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        RewardModel(model=str(tmp_path / "nowhere"), local_only=True).score(asked("x"))
    with pytest.raises(ValueError, match="label 3 is not one of 1 outputs"):
        RewardModel(model=folder, label=3).score(asked("x"))
    policy = tmp_path / "policy"
    save_model(policy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (policy / name).write_bytes((Path(folder) / name).read_bytes())
    with pytest.raises(ValueError, match=r"not a sequence classifier: no score\.weight"):
        RewardModel(model=str(policy)).score(asked("x"))
    broken = save_classifier(tmp_path / "broken")
    reward = RewardModel(model=broken)
    reward.score(asked("x"))
    reward._classifier.model.score.weight.data.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="output is nan"):
        reward.score(asked("x"))
    assert json.loads((Path(broken) / "config.json").read_text())["pad_token_id"] == 0


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollart\[train\]'"):
        RewardModel(model="x")
