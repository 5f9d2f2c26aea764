"""Generated function-repair tasks: disjoint splits, sound tests, answers of one token."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from rollart_core.errors import UserError
from rollart_envs.swe import generated
from rollart_envs.swe.answer_form import ONE_TOKEN
from rollart_envs.swe.config import FunctionRepairConfig
from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.generated import BUGS, generated_tasks, shape
from rollart_envs.swe.taskbook import generated_functions

NUM = 240


def few(source: str) -> str:
    """Return one of 256 shapes, so that many functions of a small family have the same."""
    return shape(source)[:2]


@pytest.mark.parametrize(("num_tasks", "shape_of"), [(NUM, shape), (80, few)])
def test_no_two_splits_share_a_tree(
    num_tasks: int, shape_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "shape", shape_of)
    generated_tasks.cache_clear()
    trees: dict[str, set[str]] = {"train": set(), "warm": set(), "test": set()}
    for one in generated_tasks(num_tasks):
        trees[one.split] |= {shape_of(one.task.gold_code), shape_of(one.task.buggy_code)}
    generated_tasks.cache_clear()
    assert all(trees.values())
    assert not trees["test"] & trees["train"]
    assert not trees["test"] & trees["warm"]
    assert not trees["warm"] & trees["train"]


def test_a_tree_has_neither_names_nor_constants() -> None:
    source = "def f(xs, k):\n    return max(xs[1:], key=k.real) + 2\n"
    same = "def g(a, limit):\n    # a comment\n    return min(a[3:], default=limit.imag) + None\n"
    assert shape(source) == shape(same)
    for other in ("- 2", "+ k", "+ 2 + 2", "+ -2"):
        assert shape(source) != shape(source.replace("+ 2", other))


def test_functions_with_the_tree_of_another_split_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one tree in all functions, one split gets one task, and the rest are refused."""
    monkeypatch.setattr(generated, "shape", lambda source: "the same")
    generated_tasks.cache_clear()
    try:
        with pytest.raises(ValueError, match="only 1 of 7 functions differ"):
            generated_tasks(7)
    finally:
        generated_tasks.cache_clear()


def test_each_function_occurs_once_and_has_every_kind_of_bug() -> None:
    tasks = [one.task for one in generated_tasks(NUM)]
    assert len({shape(task.gold_code) for task in tasks}) == NUM
    assert set(Counter(task.bug_type for task in tasks)) == set(BUGS)
    assert generated_tasks(NUM)[:40] == generated_tasks(40)


def run(task: FunctionTask, code: str) -> str:
    """Run the hidden test on a function; return the name of what it raises."""
    names: dict[str, object] = {}
    try:
        exec(code, names)
        exec(task.test, names)
    except Exception as error:
        return type(error).__name__
    return ""


def test_the_hidden_test_tells_each_function_from_its_bug() -> None:
    for one in generated_tasks(NUM):
        assert run(one.task, one.task.gold_code) == ""
        assert run(one.task, one.task.buggy_code) != ""
        call, _, results = one.task.example.partition(" gives ")
        assert (
            f"assert {call} == {results.partition(' instead of ')[2].rstrip('.')}\n"
            in one.task.test
        )
        assert ONE_TOKEN.candidate(one.task, ONE_TOKEN.answer(one.task, one.task.gold_code)) == (
            one.task.gold_code
        )


TASK = FunctionTask(
    task_id="t",
    entry_point="f",
    declaration="def f(xs, k):\n",
    buggy_solution="    total = 0\n    for n in xs:\n        if n > k:  # n at least k\n"
    "            total += n - n\n    return total\n",
    canonical_solution="",
    test="",
    instruction="Add.",
    example="f([1], 1) gives 0 instead of 1.",
)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("4 > to >=", "        if n >= k:  # n at least k"),
        (" 4 n to k\n", "        if k > k:  # n at least k"),
        ("5 - to *", "            total += n * n"),
        ("5 += to -=", "            total -= n - n"),
        ("2 0 to 1", "    total = 1"),
        ("5 n to k", None),  # twice in the line
        ("4 least to most", None),  # only in the comment
        ("5 + to -", None),  # not a token of the line
        ("4 > >=", None),
        ("0 def to x", None),
        ("7 > to >=", None),
        ("4 > to > =", None),
        ("4 > to >=\n2 0 to 1", None),
        ("", None),
    ],
)
def test_an_answer_replaces_a_token_that_its_line_has_once(answer: str, line: str | None) -> None:
    code = ONE_TOKEN.candidate(TASK, answer)
    if line is None:
        assert code is None
    else:
        assert code is not None
        old, new = TASK.buggy_code.split("\n"), code.split("\n")
        assert [b for a, b in zip(old, new, strict=True) if a != b] == [line]


def test_a_change_of_more_than_one_token_has_no_answer() -> None:
    assert ONE_TOKEN.answer(TASK, TASK.buggy_code.replace("n - n", "k + k")) == ""
    assert ONE_TOKEN.answer(TASK, TASK.buggy_code.replace("> k", "< n")) == ""
    assert ONE_TOKEN.answer(TASK, TASK.buggy_code) == ""


def test_the_prompt_has_numbered_lines_and_the_call_that_fails() -> None:
    assert "Add.\n1 def f(xs, k):\n2     total = 0\n" in ONE_TOKEN.statement(TASK)
    assert "\n6     return total\nf([1], 1) gives 0 instead of 1.\n" in ONE_TOKEN.statement(TASK)


def wrong(env: FunctionRepairEnv) -> str:
    """Return an answer that gives a function with wrong results: another start value."""
    start = env.task.buggy_code.split("\n")[1].split()[2]
    return f"2 {start} to 987"


def test_answers_whose_verdict_is_known_need_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    env = FunctionRepairEnv(num_generated=40, num_attempts=1, sandbox="bubblewrap")

    async def no_sandbox(**needs: object) -> None:
        raise AssertionError("a sandbox was opened")

    monkeypatch.setattr(env, "open_sandbox", no_sandbox)
    try:
        env.reset(options={"task": 0, "split": "test"})
        assert env.step(env.oracle() or "")[1] == 1.0
        env.reset(options={"task": 0, "split": "test"})
        observation, reward, over, *_ = env.step("no edit")
        assert (reward, over) == (0.0, True)
        assert "names no token" in observation
        env.reset(options={"task": 0, "split": "test"})
        assert "it is not valid Python" in env.step("1 def to return")[0]
        env.reset(options={"task": 0, "split": "test"})
        with pytest.raises(AssertionError, match="a sandbox was opened"):
            env.step(wrong(env))
    finally:
        env.close()


def test_equal_answers_at_once_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart_core.rollout import loop
    from rollart_sandboxes.judging.functions import Judgement

    judged: list[str] = []

    async def judge(self: FunctionRepairEnv, candidate: str) -> Judgement:
        judged.append(candidate)
        await asyncio.sleep(0)
        return Judgement("failed", told="it returned a wrong result")

    monkeypatch.setattr(FunctionRepairEnv, "_judged", judge)
    envs = [FunctionRepairEnv(num_generated=40, sandbox="bubblewrap") for _ in range(4)]

    async def play() -> list[float]:
        async def one(env: FunctionRepairEnv) -> float:
            await env.areset(options={"task": 1, "split": "test"})
            return (await env.astep(wrong(env)))[1]

        return await asyncio.gather(*map(one, envs))

    assert loop.run(play()) == [0.0] * 4
    assert len(judged) == 1
    for env in envs:
        env.close()


def test_tasks_come_from_one_source(tmp_path) -> None:
    with pytest.raises(ValueError, match="num_generated and tasks exclude each other"):
        FunctionRepairConfig(num_generated=5, tasks=tmp_path / "tasks.jsonl")


def test_more_tasks_than_there_are_functions_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_few(num_tasks: int) -> None:
        raise ValueError("only 3 of 9 functions differ")

    monkeypatch.setattr("rollart_envs.swe.taskbook.generated_tasks", too_few)
    with pytest.raises(UserError, match="num_generated: only 3 of 9 functions differ"):
        generated_functions(9)
