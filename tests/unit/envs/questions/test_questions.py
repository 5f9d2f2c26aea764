"""``text/Questions-v1``: questions of a dataset, or sums."""

import json

import pytest

from rollart_core.errors import ConfigError, UserError
from rollart_core.plugins import registry
from rollart_envs.questions.env import sums


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def all_in_train(**options):
    return registry.make("questions", shares={"warm": 0, "validation": 0, "test": 0}, **options)


def first(env):
    page, info = env.reset(options={"task": 0})
    return page, info["reward_context"]


def test_every_sum_is_in_one_split():
    found = sums()
    asked = [question.text for split in found.values() for question in split]
    assert len(asked) == len(set(asked)) == 10_000
    env = registry.make("questions")
    page, info = env.reset(options={"split": "test", "task": 3})
    a, b = (int(n) for n in page.removeprefix("What is ").removesuffix("?").split(" + "))
    assert info == {"reward_context": {"reference": str(a + b)}}
    assert env.step(f" {a + b}\n")[1:] == (1.0, True, False, {"success": True})


def test_options_name_the_fields(tmp_path):
    rows = [{"q": f"q{n}?", "a": {"b": [n, f"no. {n}"]}, "t": {"n": n}} for n in range(1, 3)]
    made = {"file": write(tmp_path / "q.jsonl", *rows), "question": "q", "answer": "a.b"}
    env = all_in_train(**made, context={"tests": "t"}, prompt="Think.")
    page, context = first(env)
    assert page == "Think.\nq1?"
    assert context == {
        "a": {"b": [1, "no. 1"]},
        "t": {"n": 1},
        "reference": [1, "no. 1"],
        "tests": {"n": 1},
    }
    assert env.oracle() == "1"
    assert env.step("no.  1")[1] == 1.0
    assert env.oracle() is None


@pytest.mark.parametrize(
    ("row", "page", "reference"),
    [
        ({"prompt": "p", "question": "q", "answer": "a"}, "p", "a"),
        ({"question": "q", "solution": "s"}, "q", "s"),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
            [{"role": "user", "content": "u"}],
            "v",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "t"}]}], "answer": 3},
            [{"role": "user", "content": "t"}],
            3,
        ),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "c"}]}, "p", "c"),
    ],
)
def test_fields_with_known_names_are_found(tmp_path, row, page, reference):
    env = all_in_train(file=write(tmp_path / "q.jsonl", row))
    asked, context = first(env)
    assert (asked, context["reference"]) == (page, reference)
    assert env.observation_space.contains(asked)
    assert env.oracle() == str(reference)


def test_other_columns_reach_the_reward_and_what_is_not_json_does_not(tmp_path):
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    day = datetime.date(2026, 1, 2)
    table = pa.table({"question": ["q"], "level": [3], "day": [day], "raw": [b"\0"]})
    pq.write_table(table, tmp_path / "q.parquet")
    env = all_in_train(file=str(tmp_path / "q.parquet"))
    assert first(env)[1] == {"level": 3, "day": "2026-01-02"}


def test_without_a_right_answer_it_does_not_say_who_was_right(tmp_path):
    rows = [{"question": "Write a poem.", "topic": "snow", "split": "train"}]
    env = registry.make("questions", file=write(tmp_path / "q.jsonl", *rows))
    env.reset(options={"task": 0})
    assert env.oracle() is None
    assert env.secrets() == ()
    assert env.step("Snow is white.")[1:] == (0.0, True, False, {})
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("again")


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": " ", "answer": 1}, "row 2: .*question.*not empty"),
        ({"question": "q2"}, "row 2: .*answer.*is missing"),
        ({"answer": 1}, "row 2: .*question.*is missing"),
        ({"qestion": "q", "answer": 1}, "row 2: .*Did you mean 'qestion'"),
        ({"question": "q", "answer": 1, "split": "other"}, "row 2: .*'other', not one of train"),
        ({"question": "q", "answer": float("nan")}, "row 2: .*not JSON"),
        ({"question": IMAGE, "answer": 1}, "row 2: .*type 'image'; text models read only text"),
        ({"question": [{"role": "robot", "content": "x"}], "answer": 1}, "its role must be one of"),
        ([], "row 2: .*no JSON object"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, reason):
    path = write(tmp_path / "q.jsonl", {"question": "q", "answer": 1}, row)
    with pytest.raises(UserError, match=reason) as caught:
        registry.make("questions", file=path)
    assert "\n" not in str(caught.value)


def test_the_line_of_broken_json_is_named(tmp_path):
    lines = [json.dumps({"question": f"q{n}", "answer": n}) for n in range(5_000)]
    lines[4_710] = lines[4_710][:-1]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"row 4711: .*is no JSON"):
        registry.make("questions", file=str(tmp_path / "q.jsonl"))


def test_a_first_row_without_a_question_names_its_fields(tmp_path):
    path = write(tmp_path / "q.jsonl", {"Question": "q", "id": 1})
    with pytest.raises(UserError, match=r"the fields are Question, id\. Set the option question"):
        registry.make("questions", file=path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"context": {"a": "b"}}, "context has no effect without a file"),
        ({"split_seed": 2}, "split_seed has no effect without a file"),
        ({"file": "a.jsonl", "preset": "gsm8k", "answer": "x"}, "answer has no effect with a pres"),
        ({"file": "a.jsonl", "subset": "main"}, "a.jsonl is not on the hub"),
        ({"file": {"other": "a.jsonl"}}, "'other' is not one of train"),
        ({"file": "a.jsonl", "shares": {"test": 0.9}}, "must leave some for train"),
    ],
)
def test_options_without_effect_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        registry.checked_options("environments", "questions", options)


def test_options_with_defaults_are_options(tmp_path):
    for options in ({}, {"file": "a.jsonl"}, {"file": {"train": "a.csv"}, "preset": "math"}):
        whole = registry.checked_options("environments", "questions", options)
        assert registry.checked_options("environments", "questions", whole) == whole


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        registry.make("questions", file=str(tmp_path / "none.jsonl"))
