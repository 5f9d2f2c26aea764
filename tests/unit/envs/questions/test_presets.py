"""Presets: what each reads, and that its reward accepts what it demonstrates."""

import json

import pytest

from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_rewards.examples import asked

CHOICES = ["blue", "red", "green"]


def opened(path, preset, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = {"warm": 0, "validation": 0, "test": 0}
    env = registry.make("questions", file=str(path), preset=preset, shares=shares)
    page, info = env.reset(options={"task": 0})
    return env, page, info["reward_context"]


@pytest.mark.parametrize(
    ("preset", "row", "reference"),
    [
        ("gsm8k", {"question": "q", "answer": "1,000 + 234\n#### 1,234"}, "1234"),
        ("math", {"problem": "q", "solution": r"so \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
        ("math", {"problem": "q", "solution": r"no \boxed{3}", "answer": "3"}, "3"),
        ("multiple-choice", {"question": "q", "choices": CHOICES, "answer": 1}, "B"),
        ("multiple-choice", {"question": "q", "choices": CHOICES, "answer": "C"}, "C"),
        ("multiple-choice", {"question": "q", "options": CHOICES, "answer": "green"}, "C"),
        (
            "multiple-choice",
            {"question": "q", "choices": {"text": CHOICES, "label": "123"}, "answerKey": "2"},
            "B",
        ),
    ],
)
def test_the_right_answer_is_read(tmp_path, preset, row, reference):
    env, page, context = opened(tmp_path / "q.jsonl", preset, row)
    assert context["reference"] == reference
    assert "q" in page.split()
    shown = env.oracle()
    assert shown
    fitting = dict(env.config.fitting_reward())
    if preset != "math":  # starts processes
        reward = registry.build("rewards", fitting.pop("id"), fitting)
        assert reward.score(asked(shown, context=context)).value == 1.0
        assert reward.score(asked(f"I think: {shown}.", context=context)).value == 1.0
        assert reward.score(asked("I do not know", context=context)).value == 0.0
    assert env.step(shown)[4] == {"success": True}  # for a warm start
    env.reset(options={"task": 0})
    assert env.step(f"I think: {shown}.")[4] == {}


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"prompt": "p", "tests": {"inputs": ["1"], "outputs": ["1"]}}, None),
        (
            {"text": "p", "code": "def f(x):\n    return x", "test_list": ["assert f(1) == 1"]},
            {"entry_point": "f", "test": ["assert f(1) == 1"], "setup": ""},
        ),
        (
            {"prompt": "def g():\n", "entry_point": "g", "test": "def check(c): assert c() == 1"},
            {"entry_point": "g", "test": "def check(c): assert c() == 1"},
        ),
    ],
)
def test_tests_of_code_are_read(tmp_path, row, tests):
    _, page, context = opened(tmp_path / "q.jsonl", "code", row)
    assert context["tests"] == (tests or row["tests"])
    assert page.startswith("Write Python.")


@pytest.mark.parametrize(
    ("preset", "row", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "42"}, "must end with ####"),
        ("gsm8k", {"question": "q"}, "answer.*is missing"),
        ("math", {"problem": "q", "solution": "3"}, "has no .*boxed"),
        ("multiple-choice", {"question": "q", "choices": ["a"], "answer": 0}, "2 to 26 choices"),
        ("multiple-choice", {"question": "q", "choices": CHOICES, "answer": "D"}, "one of the 3"),
        ("code", {"prompt": "p"}, "tests.*is missing"),
    ],
)
def test_a_row_of_another_format_is_named(tmp_path, preset, row, reason):
    with pytest.raises(UserError, match=f"row 1: .*{reason}"):
        opened(tmp_path / "q.jsonl", preset, row)
