"""What gem and TextArena do that their adapters must not pass on."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from rollart_core.errors import PluginError, UnknownIdError
from rollart_core.plugins import registry

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]
NO_GEM = "gem-llm is not installed: `make adapters` installs it"
NO_TEXTARENA = "textarena is not installed: `make adapters` installs it"


def has_words() -> bool:
    nltk = pytest.importorskip("nltk")
    try:
        nltk.data.find("corpora/words.zip")
    except LookupError:
        return False
    return True


@pytest.fixture
def gem() -> None:
    pytest.importorskip("gem", reason=NO_GEM)


@pytest.fixture
def textarena() -> None:
    pytest.importorskip("textarena", reason=NO_TEXTARENA)


@pytest.mark.usefixtures("gem")
def test_gem_leaves_the_loggers_and_the_generators_alone() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers), random.getstate()
    env: Any = registry.make("gem::game:Mastermind-v0-hard")
    env.reset(seed=1)
    env.step("\\boxed{1 2 3 4}")
    env.close()
    assert (root.level, list(root.handlers), random.getstate()) == before


@pytest.mark.usefixtures("gem")
def test_gem_questions_repeat_by_seed_and_test_shares_none_with_train() -> None:
    env: Any = registry.make("gem::rg:leg_counting")
    first = env.reset(options={"task": 7})[0]
    for task in range(510):  # gem makes itself new questions after 500
        env.reset(options={"task": task})
    assert env.reset(options={"task": 7})[0] == first
    seen = {split: set() for split in ("train", "test")}
    for split, questions in seen.items():
        for task in range(100):
            questions.add(env.reset(options={"task": task, "split": split})[0])
    env.close()
    assert seen["train"] & seen["test"] == set()


@pytest.mark.usefixtures("gem")
def test_a_gem_game_that_needs_a_corpus_or_a_library() -> None:
    if not has_words():
        with pytest.raises(PluginError, match=r"nltk\.downloader words"):
            registry.env_spec("gem::game:Wordle-v0-easy")
    with pytest.raises(UnknownIdError, match="Did you mean"):
        registry.env_spec("gem::game:Mastermind-v1")
    with pytest.raises(PluginError, match="does not use a dataset"):
        registry.env_spec("gem::game:Mastermind-v0-hard", {"dataset": "x.jsonl"})
    with pytest.raises(PluginError, match="not registered"):
        registry.make("gem::rg:leg_counting", make={"name": "no_such_set"})


@pytest.mark.usefixtures("gem")
def test_gem_questions_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    for split in ("train", "test"):
        row = {"problem": f"Add 1 and 2 for {split}.", "answer": "3"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    env: Any = registry.make("gem::math:GSM8K", dataset=str(tmp_path / "{split}.jsonl"))
    assert env.reset(options={"task": 0, "split": "test"})[0] == "Add 1 and 2 for test."
    assert env.step("\\boxed{3}")[1:3] == (1.0, True)
    assert env.reset(options={"task": 0, "split": "train"})[0] == "Add 1 and 2 for train."
    assert env.step("\\boxed{4}")[1:3] == (0.0, True)
    env.close()


@pytest.mark.usefixtures("textarena")
def test_textarena_shows_what_is_new_or_the_whole_game() -> None:
    env: Any = registry.make("textarena::TowerOfHanoi-v0")
    prompt = env.reset(seed=1)[0]
    assert "Tower of Hanoi" in prompt
    new = env.step("[A C]")[0]
    assert "moved disk 1" in new
    assert "Tower of Hanoi" not in new
    assert "[A C]" not in new
    env.close()
    env = registry.make("textarena::TowerOfHanoi-v0", history=True)
    env.reset(seed=1)
    whole = env.step("[A C]")[0]
    assert "Tower of Hanoi" in whole
    assert "[A C]" in whole
    again = env.reset(seed=1)[0]
    assert "moved disk 1" not in again, "the text of the game before"
    env.close()


@pytest.mark.usefixtures("textarena")
def test_textarena_forgives_one_invalid_move() -> None:
    env: Any = registry.make("textarena::GuessTheNumber-v0")
    env.reset(options={"task": 0})
    assert env.step("what?")[2:] == (False, False, {"invalid_action": True})
    observation, reward, terminated, _, info = env.step("what?")
    assert (reward, terminated, info["invalid_action"]) == (0.0, True, True)
    assert "Invalid" in observation
    env.close()


@pytest.mark.usefixtures("textarena")
def test_a_game_that_gives_text_as_its_reward_earns_nothing() -> None:
    env: Any = registry.make("textarena::Countdown-v0")
    env.reset(options={"task": 0})
    env.step("no")
    assert env.step("no")[1:3] == (0.0, True)
    env.close()


@pytest.mark.usefixtures("textarena")
@pytest.mark.parametrize(
    ("name", "says"),
    [("TicTacToe-v0", "multiplayer game"), ("GuessWho-v0", "OPENROUTER_API_KEY")],
)
def test_games_that_cannot_be_played_alone(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(PluginError, match=says):
        registry.env_spec(f"textarena::{name}")


@pytest.mark.usefixtures("textarena")
def test_what_a_game_prints_is_not_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    env: Any = registry.make("textarena::LogicPuzzle-v0")
    env.reset(options={"task": 0})
    env.step("nonsense")
    env.close()
    assert capsys.readouterr().out == ""
