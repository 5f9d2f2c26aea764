"""``text/Questions-v1``: questions of a file, or sums."""

import json

import pytest

from rollart_core.errors import ConfigError, UserError
from rollart_core.plugins import registry
from rollart_envs.questions.env import sums


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_sum_is_in_one_split():
    found = sums()
    asked = [question.text for split in found.values() for question in split]
    assert len(asked) == len(set(asked)) == 10_000
    env = registry.make("questions")
    page, info = env.reset(options={"split": "test", "task": 3})
    a, b = (int(n) for n in page.removeprefix("What is ").removesuffix("?").split(" + "))
    assert info == {"reward_context": {"reference": str(a + b)}}
    assert env.step(f" {a + b}\n")[1:] == (1.0, True, False, {"success": True})


def test_a_file_says_what_its_fields_are(tmp_path):
    rows = [{"q": f"q{n}?", "a": [n, f"no. {n}"], "tests": {"n": n}} for n in range(1, 21)]
    context = {"reference": "a", "tests": "tests"}
    made = {"file": write(tmp_path / "q.jsonl", *rows), "question": "q", "context": context}
    env = registry.make("questions", **made, prompt="Think.")
    assert [env.num_tasks(split) for split in ("train", "warm", "test")] == [16, 2, 2]
    page, info = env.reset(options={"split": "test", "task": 0})
    assert page == "Think.\nq10?"
    assert info["reward_context"] == {"reference": [10, "no. 10"], "tests": {"n": 10}}
    assert env.oracle() == "10"
    assert env.step("no.  10")[1] == 1.0
    assert env.oracle() is None


def test_without_a_right_answer_it_does_not_say_who_was_right(tmp_path):
    rows = [{"question": "Write a poem.", "topic": "snow", "split": "train"}]
    made = {"file": write(tmp_path / "q.jsonl", *rows), "context": {"topic": "topic"}}
    env = registry.make("questions", **made)
    env.reset(options={"task": 0})
    assert env.oracle() is None
    assert env.secrets() == ()
    assert env.step("Snow is white.")[1:] == (0.0, True, False, {})
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("again")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": " ", "answer": 1}, "row 2: .*question.*not empty"),
        ({"question": "q"}, "row 2: .*answer.*is missing"),
        ({"question": "q", "answer": 1, "split": "dev"}, "row 2: .*'dev', not one of train"),
        ({"question": "q", "answer": float("nan")}, "row 2: .*not JSON"),
        ([], "row 2: .*no JSON object"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, reason):
    path = write(tmp_path / "q.jsonl", {"question": "q", "answer": 1}, row)
    with pytest.raises(UserError, match=reason):
        registry.make("questions", file=path)


def test_a_file_that_is_not_there_and_options_without_effect_are_told(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        registry.make("questions", file=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="context has no effect without a file"):
        registry.checked_options("environments", "questions", {"context": {"a": "b"}})
    whole = registry.checked_options("environments", "questions", {})
    assert registry.checked_options("environments", "questions", whole) == whole
