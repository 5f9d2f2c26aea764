"""Generated function-repair tasks: disjoint splits, sound tests, and their interpreter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollart_core.errors import UserError
from rollart_envs.swe import generated
from rollart_envs.swe.config import FunctionRepairConfig
from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.generated import (
    BUGS,
    SmallFunction,
    UnknownCode,
    generated_tasks,
    problem_of,
    shape,
)
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
        for judge in (problem_of, run):
            assert judge(one.task, one.task.gold_code) == ""
            assert judge(one.task, one.task.buggy_code) != ""


def test_only_the_buggy_function_has_comments() -> None:
    for one in generated_tasks(NUM):
        code, gold = one.task.buggy_code.split("\n"), one.task.gold_code.split("\n")
        bare = [line.partition("  # ")[0] for line in code]
        assert code != bare
        assert len([new for new, old in zip(gold, bare, strict=True) if new != old]) == 1


def test_answers_in_the_language_of_the_functions_need_no_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = FunctionRepairEnv(num_generated=40, num_attempts=1, sandbox="bubblewrap")

    async def no_sandbox(**needs: object) -> None:
        raise AssertionError("a sandbox was opened")

    monkeypatch.setattr(env, "open_sandbox", no_sandbox)

    def step(answer: str) -> tuple[str, float]:
        env.reset(options={"task": 0, "split": "test"})
        return env.step(answer)[:2]

    try:
        env.reset(options={"task": 0, "split": "test"})
        right, head = env.oracle() or "", env.task.declaration
        assert right.startswith(f"```python\n{head}")
        assert step(right)[1] == 1.0
        for answer, told in (
            ("no answer", "it is not valid Python"),
            ("```python\ndef g(): return 1\n```", f"does not define `{env.task.entry_point}`"),
            (f"{head}    return nothing\n", "NameError was raised"),
            (f"```python\n{env.task.buggy_code}```", "a wrong result"),
        ):
            observation, reward = step(answer)
            assert (told in observation, reward) == (True, 0.0)
        with pytest.raises(AssertionError, match="a sandbox was opened"):
            step(f"{head}    import os\n")
    finally:
        env.close()


def in_python(task: FunctionTask, code: str) -> bool:
    """Return whether a function passes, executed as Python."""
    return run(task, code) == ""


def test_the_language_has_the_results_of_python() -> None:
    """Lines of other functions in place of a line give many kinds of wrong functions."""
    rng = random.Random(1)
    tasks = [one.task for one in generated_tasks(NUM)]
    codes = [line.strip() for t in tasks for line in t.gold_code.split("\n") if line]
    verdicts = Counter[object]()
    for task in tasks * 4:
        lines = task.gold_code.split("\n")
        number = rng.randrange(len(lines) - 1)
        indent = " " * (len(lines[number]) - len(lines[number].lstrip()))
        lines[number] = indent + rng.choice(codes)
        code = "\n".join(lines)
        try:
            verdict: object = problem_of(task, code) == ""
            assert verdict is in_python(task, code)
        except (SyntaxError, UnknownCode) as error:
            verdict = type(error)
        verdicts[verdict] += 1
    assert verdicts[False] > NUM
    assert verdicts[True] > 0
    assert verdicts[SyntaxError] + verdicts[IndentationError] > NUM


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import os", "Import"),
        ("return ''", "Constant"),
        ("return 18446744073709551616", "Constant"),
        ("return xs.pop()", "Call"),
        ("return xs[0]", "Subscript"),
        ("return max", "Name"),
        ("return f", "Name"),
        ("return xs.k", "Attribute"),
        ("return xs + xs", "no numbers"),
        ("return [x for x in xs]", "ListComp"),
        ("return k ** k", "Pow"),
        ("xs += xs", "AugAssign"),
        ("while k: k = k", "While"),
        ("for x in xs:\n     for x in xs:\n      for x in xs: k = x", "too many steps"),
        ("for x in xs: k = k * k", "too large"),
        ("return " + "k + " * 5000 + "k", "nested too deeply|not one function"),
        ("def g(): return k", "FunctionDef"),
        ("xs.k = 1", "Assign"),
        ("k = k = 1", "Assign"),
    ],
)
def test_the_language_has_nothing_that_can_do_harm(body: str, why: str) -> None:
    with pytest.raises(UnknownCode, match=why):
        SmallFunction(f"def f(xs, k):\n    {body}\n")(list(range(12)), 3)


@pytest.mark.parametrize(
    "source",
    [
        "f = 1",
        "def f(): pass\ndef g(): pass",
        "@f\ndef f(): pass",
        "def f(x=1): pass",
        "def f(*x): pass",
        "def f(x, x): pass",
        "def f(x: y): pass",
        "def f() -> y: pass",
        "async def f(): pass",
        "f = \x00",
        "",
    ],
)
def test_a_source_that_is_not_one_plain_function_is_not_run(source: str) -> None:
    with pytest.raises((UnknownCode, SyntaxError)):
        SmallFunction(source)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return 7 // k", 2),
        ("return k / 2", 1.5),
        ("return xs == xs", True),
        ("for x in xs:\n        if x == 2:\n            return x", 2),
        ("k = 4 % k\n    return k", 1),
        ("k = 1", None),
    ],
)
def test_functions_return_what_python_returns(body: str, result: object) -> None:
    source = f"def f(xs, k):\n    {body}\n"
    names: dict[str, Any] = {}
    exec(source, names)
    assert SmallFunction(source)([1, 2], 3) == names["f"]([1, 2], 3) == result


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return y", NameError),
        ("return k // 0", ZeroDivisionError),
        ("return k < xs", TypeError),
        ("for x in k: k = x", TypeError),
    ],
)
def test_errors_are_those_of_python(body: str, error: type[Exception]) -> None:
    function = SmallFunction(f"def f(xs, k):\n    {body}\n")
    with pytest.raises(error):
        function([1, 2], 3)
    with pytest.raises(TypeError):
        function([1, 2])


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
