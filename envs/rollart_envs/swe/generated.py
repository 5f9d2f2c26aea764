"""Generated function-repair tasks: small functions over lists of numbers, each with one bug.

    lines, each with a comment --> function --> one mutation --> calls that show it --> task

Takes: a number of tasks. Gives: tasks in splits, each with a failing call, and a hidden test made
of the results of the correct function. Comments say what each line does. The bugs replace one
token: operators and off by one, from :mod:`rollart_envs.swe.mutate`, and a wrong variable.

Never: has a function in two splits. Functions are compared as syntax trees in which all names are
equal and all constants are equal (:func:`shape`). No correct and no buggy function of a split has
the tree of a correct or buggy function of another split.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

from rollart_envs.swe.answer_form import ONE_TOKEN
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.mutate import Mutation, mutated, mutations
from rollart_envs.swe.source_lines import source_lines

BUGS: Final = ("comparison", "arithmetic", "boolean", "constant", "variable")
"""The kinds of bugs; ``variable`` is another variable in place of the right one."""
PURPOSE: Final = "One token of the code contradicts its comment."
SHARES: Final = {"test": 0.2, "warm": 0.1, "train": 0.7}
NUM_CALLS: Final = 24
"""Number of calls of a hidden test."""
_MOST_DRAWS: Final = 200
"""Number of functions in a row without a new task after which the family counts as exhausted."""
_COMPARISONS: Final = (
    *((">", "above"), (">=", "at least"), ("<", "below"), ("<=", "at most")),
    *(("==", "equal to"), ("!=", "different from")),
)


@dataclass(frozen=True, slots=True)
class GeneratedTask:
    """A task and the split it belongs to."""

    split: str
    task: FunctionTask


@lru_cache(maxsize=4)
def generated_tasks(num_tasks: int) -> tuple[GeneratedTask, ...]:
    """Return tasks in splits; each process generates them once.

    Raises:
        ValueError: If there are fewer different functions than ``num_tasks``.
    """
    rng = random.Random("functions 0")
    owners: dict[str, str] = {}
    golds: set[str] = set()
    made: list[GeneratedTask] = []
    num_draws = 0
    while len(made) < num_tasks:
        if (num_draws := num_draws + 1) > _MOST_DRAWS:
            raise ValueError(f"only {len(made)} of {num_tasks} functions differ")
        split = rng.choices(list(SHARES), list(SHARES.values()))[0]
        task = _task(rng, f"generated/{len(made)}", rng.choice(BUGS))
        if task is None:
            continue
        gold, buggy = shape(task.gold_code), shape(task.buggy_code)
        if gold in golds or {owners.get(gold, split), owners.get(buggy, split)} != {split}:
            continue
        owners[gold] = owners[buggy] = split
        golds.add(gold)
        made.append(GeneratedTask(split, task))
        num_draws = 0
    return tuple(made)


def shape(source: str) -> str:
    """Return a hash of a source's syntax tree, with all names equal and all constants equal."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("id", "arg", "name", "attr"):
            if isinstance(getattr(node, field, None), str):
                setattr(node, field, "_")
        if isinstance(node, ast.Constant):
            node.value = 0
    return sha256(ast.dump(tree).encode()).hexdigest()


class _Writer:
    """Writes one function, in which a comment says what each line does."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name = rng.choice(("f", "solve", "compute", "measure"))
        self.items = rng.choice(("numbers", "values", "scores"))
        self.item = rng.choice(("n", "x", "value"))
        self.total = rng.choice(("total", "result", "answer"))
        self.params = rng.choice((("k",), ("limit",), ("low", "high"), ("a", "b")))
        self.used: set[str] = set()

    def write(self) -> str:
        """Return the source."""
        start = self.rng.randint(0, 4)
        lines = [f"    {self.total} = {start}  # start at {start}", self.loop()]
        draw = self.rng.random()
        if draw < 0.3:
            lines.append(f"        {self.step()}")
        else:
            lines += [f"        {self.condition()}", f"            {self.step()}"]
        if draw > 0.8:
            lines += ["        else:", f"            {self.step()}"]
        lines.append(f"    {self.result()}")
        parameters = ", ".join((self.items, *(p for p in self.params if p in self.used)))
        return "\n".join((f"def {self.name}({parameters}):", *lines, ""))

    def loop(self) -> str:
        """Return the head of the loop."""
        num, end = self.rng.randint(1, 2), self.operand()
        items, said = self.rng.choice(
            (
                (self.items, f"all {self.items}"),
                (f"{self.items}[{num}:]", f"without the first {num}"),
                (f"{self.items}[:-{num}]", f"without the last {num}"),
                (f"range({num}, {end})", f"from {num} to below {end}"),
                (f"range({num}, {end} + 1)", f"from {num} up to {end}"),
            )
        )
        return f"    for {self.item} in {items}:  # {said}"

    def condition(self) -> str:
        """Return a condition on the item."""
        code, said = self.comparison()
        if self.rng.random() < 0.3:
            joined = self.rng.choice(("and", "or"))
            more, also = self.comparison()
            code, said = f"{code} {joined} {more}", f"{said} {joined} {also}"
        return f"if {code}:  # {said}"

    def comparison(self) -> tuple[str, str]:
        """Return one comparison, and its words."""
        if self.rng.random() < 0.2:
            sign, word = self.rng.choice((("==", ""), ("!=", "not ")))
            by = self.constant()
            return f"{self.item} % {by} {sign} 0", f"{word}divisible by {by}"
        sign, word = self.rng.choice(_COMPARISONS)
        other = self.operand()
        return f"{self.item} {sign} {other}", f"{self.item} {word} {other}"

    def step(self) -> str:
        """Return what is done with the item."""
        item, other = self.item, self.operand()
        code, said = self.rng.choice(
            (
                (item, item),
                (f"{item} * {other}", f"{item} times {other}"),
                (f"{item} + {other}", f"{item} plus {other}"),
                (f"{item} - {other}", f"{item} minus {other}"),
                (f"{other} - {item}", f"{other} minus {item}"),
                (f"{item} * {item}", f"{item} squared"),
            )
        )
        sign, word = self.rng.choice((("+=", "add"), ("-=", "subtract")))
        return f"{self.total} {sign} {code}  # {word} {said}"

    def result(self) -> str:
        """Return the last line."""
        total, other = self.total, self.operand()
        code, said = self.rng.choice(
            (
                (total, f"the {total}"),
                (f"{total} + {other}", f"{total} plus {other}"),
                (f"{total} - {other}", f"{total} minus {other}"),
                (f"{total} * {other}", f"{total} times {other}"),
                (f"max({total}, {other})", f"{total} but at least {other}"),
            )
        )
        return f"return {code}  # {said}"

    def operand(self) -> str:
        """Return a parameter or a small constant."""
        if self.rng.random() < 0.4:
            return self.constant()
        left = [name for name in self.params if name not in self.used]
        chosen = left[0] if left else self.rng.choice(self.params)
        self.used.add(chosen)
        return chosen

    def constant(self) -> str:
        """Return a small constant."""
        return str(self.rng.randint(2, 6))


def _task(rng: random.Random, task_id: str, bug: str) -> FunctionTask | None:
    """Draw a function with a bug of this kind; None if it has no such bug that a call shows."""
    writer = _Writer(rng)
    source = writer.write()
    choices = list(_variables(source)) if bug == "variable" else mutations(source, [bug])
    if not choices:
        return None
    buggy = mutated(source, [rng.choice(choices)])
    num_args = len(ast.parse(source).body[0].args.args)  # type: ignore[attr-defined]
    calls = [_arguments(rng, num_args) for _ in range(NUM_CALLS)]
    right, wrong = _results(source, writer.name, calls), _results(buggy, writer.name, calls)
    shown = [i for i in range(NUM_CALLS) if right[i] != wrong[i]]
    if not shown:
        return None
    first = min(shown, key=lambda i: len(repr(calls[i])))
    call = f"{writer.name}({', '.join(map(repr, calls[first]))})"
    said = wrong[first]
    asserts = "".join(
        f"    assert {writer.name}({', '.join(map(repr, args))}) == {value!r}\n"
        for args, value in zip(calls, right, strict=True)
    )
    head, body = source.split("\n", 1)
    task = FunctionTask(
        task_id=task_id,
        entry_point=writer.name,
        declaration=f"{head}\n",
        buggy_solution=buggy.split("\n", 1)[1],
        canonical_solution=body,
        test=f"def check({writer.name}):\n{asserts}\n\ncheck({writer.name})\n",
        instruction=PURPOSE,
        bug_type=bug,
        example=f"{call} gives {said} instead of {right[first]}.",
    )
    return task if ONE_TOKEN.answer(task, source) else None


def _arguments(rng: random.Random, num: int) -> list[Any]:
    numbers = [rng.randint(0, 9) for _ in range(rng.randint(0, 6))]
    return [numbers, *(rng.randint(1, 7) for _ in range(num - 1))]


def _results(source: str, name: str, calls: list[list[Any]]) -> list[object]:
    """Return the result of each call of a generated function, or the name of its exception."""
    names: dict[str, Any] = {}
    exec(compile(source, "<generated>", "exec", dont_inherit=True), names)
    results: list[object] = []
    for arguments in calls:
        try:
            results.append(names[name](*arguments))
        except Exception as error:
            results.append(type(error).__name__)
    return results


def _variables(source: str) -> Iterator[Mutation]:
    """Yield the replacements of a number by another variable that holds one."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    starts = [0]
    for line in source_lines(source):
        starts.append(starts[-1] + len(line))
    found = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {node.id for node in found if isinstance(node.ctx, ast.Store)}
    known = sorted(stored | {a.arg for a in function.args.args[1:]})
    for node in found:
        at = starts[node.lineno - 1] + node.col_offset
        if isinstance(node.ctx, ast.Load) and node.id in known:
            for other in known:
                if other != node.id:
                    end = at + len(node.id)
                    yield Mutation("variable", function.name, 1, node.lineno, at, end, other)
