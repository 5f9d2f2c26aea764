"""The benchmark of a GRPO step beside TRL; and functions in fresh processes."""

import atexit
import subprocess
import sys
from pathlib import Path

import pytest

from rollart_bench import loop, sides, skip
from rollart_bench.one_turn import NUM_TASKS, OneTurnEnv, digits, vowel_share
from rollart_bench.skip import BenchSkipped
from rollart_core.errors import ConfigError, RollartError, UserError
from rollart_core.models.new import ASSISTANT, USER
from rollart_core.models.tokenizer import load_tokenizer
from rollart_testing import assert_checks, check_env


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return loop.save_model(loop.MODELS["0.85M"], tmp_path_factory.mktemp("loop") / "model")


def test_prompts_have_16_tokens_and_no_stop_token_can_be_sampled(model_path):
    tokenizer = load_tokenizer(model_path)
    for index in range(NUM_TASKS):
        text = tokenizer.render([{"role": "user", "content": digits(index)}], True)
        assert text == f"{USER}{digits(index)}{ASSISTANT}"  # what the other side is given
        assert len(tokenizer.encode(text)) == loop.PROMPT_TOKENS
    assert tokenizer.stop_token_ids == (loop.VOCAB_SIZE,)


def test_the_environment_is_one():
    assert_checks(check_env(OneTurnEnv))
    assert vowel_share("abe") == pytest.approx(2 / 3)
    assert vowel_share("") == 0


def test_a_step_counts_from_the_end_of_the_warm_up_to_the_last_asked_for():
    work = loop.Work("model", "runs", steps=5, threads=1)
    ended_s = [9.0, 10.0, 11.0, 12.0, 15.0, 100.0, 200.0]
    measured = {"ended_s": ended_s, "prompt_tokens": [16], "new_tokens": [64]}
    assert work._step_s(measured) == 2.0
    with pytest.raises(RollartError, match="nothing to compare"):
        work._step_s({**measured, "new_tokens": [63, 64]})


def test_rows_pair_the_sides_of_a_round(monkeypatch):
    seconds = {"sync": iter([1.0, 2.0]), "async": iter([0.5, 4.0])}
    peer = iter([2.0, 4.0])
    monkeypatch.setattr(loop.Work, "ours", lambda self, mode: next(seconds[mode]))
    monkeypatch.setattr(loop.Work, "theirs", lambda self: next(peer))
    sync, asynchronous = loop._rows("tiny", loop.Work("m", "r", 5, 1), 2)
    assert sync["ratio"] == {"min": 2.0, "median": 2.0, "max": 2.0}
    assert asynchronous["ratio"] == {"min": 1.0, "median": 2.5, "max": 4.0}
    assert (sync["ours"], sync["peer"], sync["meets_mark"]) == (1.5, 3.0, True)
    assert "async" in asynchronous["case"]


def test_too_few_steps_are_refused():
    with pytest.raises(UserError, match="steps=3: must be a whole number, 4 or more"):
        loop.run({"steps": 3})


def test_without_trl_it_is_skipped(monkeypatch):
    monkeypatch.setattr(skip, "find_spec", lambda package: None if package == "trl" else object())
    with pytest.raises(BenchSkipped, match=r"trl is not installed: pip install 'rollart\[bench\]'"):
        loop.run({})


def test_a_side_that_fails_says_why():
    with pytest.raises(RollartError, match="has no attribute 'nothing'"):
        sides.in_fresh_process("rollart_bench.sides:nothing", {})
    with pytest.raises(ConfigError, match="env"):
        sides.run_mapping({"mode": "sync"})


def loud(asked):
    """Print on every road, also after the end of the program."""
    atexit.register(print, "goodbye", flush=True)
    print("hello", file=sys.stderr)
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    print("hello", asked["number"])
    return {"number": asked["number"] + 1}


def test_what_a_side_prints_is_no_part_of_its_result(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    assert sides.in_fresh_process(f"{__name__}:loud", {"number": 1}) == {"number": 2}
    assert capfd.readouterr().out == ""
