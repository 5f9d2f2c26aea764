"""Generated function-repair tasks: small functions over lists of numbers, each with one bug.

    lines, each with a comment --> function --> one mutation --> calls that show it --> task

Takes: a number of tasks. Gives: tasks in splits, each with a hidden test made of the results of the
correct function. Comments say what each line computes. The bugs replace one
token: operators and off by one, from :mod:`rollart_envs.swe.mutate`, and a wrong variable.

Never: has a function in two splits. Functions are compared as syntax trees in which all names are
equal and all constants are equal (:func:`shape`). No correct and no buggy function of a split has
the tree of a correct or buggy function of another split.
"""

from __future__ import annotations

import ast
import builtins
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, cast

from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.mutate import Mutation, mutated, mutations
from rollart_envs.swe.source_lines import source_lines

BUGS: Final = ("comparison", "arithmetic", "constant", "variable")
"""The kinds of bugs; ``variable`` is another variable in place of the right one."""
PURPOSE: Final = "One line of the code contradicts its comment."
SHARES: Final = {"test": 0.2, "warm": 0.1, "train": 0.7}
NUM_CALLS: Final = 24
"""Number of calls of a hidden test."""
_COMMENT: Final = re.compile(r"  # .*")
_MOST_DRAWS: Final = 200
"""Number of functions in a row without a new task after which the family counts as exhausted."""
_COMPARISONS: Final = (
    *((">", "above"), (">=", "at least"), ("<", "below"), ("<=", "at most")),
    *(("==", "equal to"), ("!=", "different from")),
)
_ARITHMETIC: Final = (("+", "plus"), ("-", "minus"), ("*", "times"))


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
        writer = _Writer(rng)
        source = writer.write()
        gold = shape(source)
        if gold in golds or owners.get(gold, split) != split:
            continue
        task = _task(rng, f"generated/{len(made)}", writer.name, source, rng.choice(BUGS))
        if task is None or owners.get(buggy := shape(task.buggy_code), split) != split:
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
    """Writes one function, in which a comment says what each line computes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name = rng.choice(("f", "solve", "compute", "measure"))
        self.items = rng.choice(("numbers", "values", "scores"))
        self.item = rng.choice(("n", "x", "value"))
        self.total = rng.choice(("total", "result", "answer"))
        self.params = rng.choice((("k", "m"), ("limit", "size"), ("low", "high"), ("a", "b")))
        self.known = list(self.params)
        self.used: set[str] = set()

    def write(self) -> str:
        """Return the source."""
        lines = [self.assigned("    ", self.total)]
        lines.append(f"    for {self.item} in {self.items}:")
        self.known.append(self.item)
        draw = self.rng.random()
        if draw < 0.3:
            lines.append(self.assigned("        ", self.total))
        else:
            code, words = self.expression(_COMPARISONS)
            lines.append(f"        if {code}:  # {words}")
            lines.append(self.assigned("            ", self.total))
        if draw > 0.7:
            lines += ["        else:", self.assigned("            ", self.total)]
        self.known.remove(self.item)
        code, words = self.expression(_ARITHMETIC, self.total)
        lines.append(f"    return {code}  # {words}")
        parameters = ", ".join((self.items, *(p for p in self.params if p in self.used)))
        return "\n".join((f"def {self.name}({parameters}):", *lines, ""))

    def assigned(self, indent: str, name: str) -> str:
        """Return an assignment; later lines know its name."""
        code, words = self.expression(_ARITHMETIC, name if name in self.known else "")
        self.known += [] if name in self.known else [name]
        return f"{indent}{name} = {code}  # {words}"

    def expression(self, signs: tuple[tuple[str, str], ...], first: str = "") -> tuple[str, str]:
        """Return two operands with a sign, and its words."""
        sign, word = self.rng.choice(signs)
        left, right = first or self.rng.choice(self.known), self.operand()
        self.used |= {left, right}
        return f"{left} {sign} {right}", f"{left} {word} {right}"

    def operand(self) -> str:
        """Return a name or a small constant."""
        return (
            str(self.rng.randint(2, 6)) if self.rng.random() < 0.4 else self.rng.choice(self.known)
        )


def _task(
    rng: random.Random, task_id: str, name: str, source: str, bug: str
) -> FunctionTask | None:
    """Put a bug of this kind into a function; None if it has no such bug that a call shows."""
    choices = list(_variables(source)) if bug == "variable" else mutations(source, [bug])
    if not choices:
        return None
    buggy = mutated(source, [rng.choice(choices)])
    num_args = len(ast.parse(source).body[0].args.args)  # type: ignore[attr-defined]
    calls = [_arguments(rng, num_args) for _ in range(NUM_CALLS)]
    right = cast(list[int], _results(source, calls))
    wrong = _results(buggy, calls)
    if right == wrong or not all(-_LARGEST < result < _LARGEST for result in right):
        return None
    asserts = "".join(
        f"    assert {name}({', '.join(map(repr, args))}) == {value!r}\n"
        for args, value in zip(calls, right, strict=True)
    )
    head, body = buggy.split("\n", 1)
    return FunctionTask(
        task_id=task_id,
        entry_point=name,
        declaration=f"{head}\n",
        buggy_solution=body,
        canonical_solution=_COMMENT.sub("", source).split("\n", 1)[1],
        test=f"def check({name}):\n{asserts}\n\ncheck({name})\n",
        instruction=PURPOSE,
        bug_type=bug,
    )


class UnknownCode(Exception):
    """Code that :class:`SmallFunction` cannot run."""


class SmallFunction:
    """Runs a function in the language of the generated ones, without executing it as Python.

    The language has assignments, ``for``, ``if`` and ``return``, arithmetic and comparisons of
    numbers. Nothing in it can do harm: it has no names but its own, no calls, no attributes, and
    its numbers and loops are limited.

    Raises:
        UnknownCode: If the source is not such a function.
        SyntaxError: If it is not Python.
    """

    def __init__(self, source: str) -> None:
        try:
            function, *others = ast.parse(source).body
        except (ValueError, MemoryError, RecursionError):
            raise UnknownCode("it is not one function") from None
        if others or not isinstance(function, ast.FunctionDef) or function.decorator_list:
            raise UnknownCode("it is not one plain function")
        self.name = function.name
        self._parameters = list(dict.fromkeys(argument.arg for argument in function.args.args))
        if ast.unparse(function.args) != ", ".join(self._parameters) or function.returns:
            raise UnknownCode("it has other parameters than plain ones")
        self._body = function.body
        self._steps = 0

    def __call__(self, *arguments: Any) -> object:
        """Return the result of a call.

        Raises:
            UnknownCode: If it leaves the language, or its numbers or loops become too large.
            NameError, TypeError, ZeroDivisionError: As Python does.
        """
        if len(arguments) != len(self._parameters):
            raise TypeError("another number of arguments")
        self._steps = 0
        try:
            result = self._run(self._body, dict(zip(self._parameters, arguments, strict=True)))
        except RecursionError:
            raise UnknownCode("it is nested too deeply") from None
        return None if result is _GOES_ON else result

    def _run(self, body: list[ast.stmt], names: dict[str, Any]) -> object:
        """Run statements; return the value of ``return``, or ``_GOES_ON``."""
        for node in body:
            result: object = _GOES_ON
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = self._value(value, names)
                case ast.For(target=ast.Name(id=name), iter=items, orelse=[]):
                    result = self._loop(name, self._value(items, names), node.body, names)
                case ast.If(test=test):
                    is_true = self._value(test, names)
                    result = self._run(node.body if is_true else node.orelse, names)
                case ast.Return(value=ast.expr() as value):
                    result = self._value(value, names)
                case _:
                    raise UnknownCode(f"a statement {type(node).__name__}")
            if result is not _GOES_ON:
                return result
        return _GOES_ON

    def _loop(self, name: str, items: Any, body: list[ast.stmt], names: dict[str, Any]) -> object:
        for item in items:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise UnknownCode("it has too many steps")
            names[name] = item
            result = self._run(body, names)
            if result is not _GOES_ON:
                return result
        return _GOES_ON

    def _value(self, node: ast.expr | None, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=int() as value) if value < _LARGEST:
                return value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Name(id=name) if name != self.name and not hasattr(builtins, name):
                raise NameError(name)
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(op, self._value(left, names), self._value(right, names))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _SIGNS:
                return _SIGNS[type(sign)](self._value(left, names), self._value(right, names))
        raise UnknownCode(f"an expression {type(node).__name__}")


_GOES_ON: Final = object()
_MOST_STEPS: Final = 1000
_LARGEST: Final = 1 << 64
"""Limit of constants, and of the results of generated functions."""
_LARGEST_STEP: Final = 1 << 512
"""Limit of the numbers in between: squaring a number six times, as a generated function may, stays
below it."""
_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Div: operator.truediv},
}
_SIGNS: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne},
}


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of an operator on two numbers."""
    if type(op) not in _OPERATORS or not {type(left), type(right)} <= {int, float, bool}:
        raise UnknownCode(f"an operator {type(op).__name__}, or operands that are no numbers")
    result = _OPERATORS[type(op)](left, right)
    if not -_LARGEST_STEP < result < _LARGEST_STEP:
        raise UnknownCode("a number is too large")
    return result


def problem_of(task: FunctionTask, candidate: str) -> str:
    """Return why a function fails the hidden test of a generated task; empty if it passes.

    Raises:
        UnknownCode: If only a sandbox can run the function.
        SyntaxError: If it is not Python.
    """
    function = SmallFunction(candidate)
    if function.name != task.entry_point:
        raise UnknownCode("it has another name")
    for arguments, right in _calls(task.test):
        try:
            result = function(*arguments)
        except (NameError, TypeError, ZeroDivisionError) as error:
            return f"{type(error).__name__} was raised"
        if result != right:
            return "it returned a wrong result"
    return ""


@lru_cache(maxsize=1024)
def _calls(test: str) -> list[tuple[list[Any], Any]]:
    """Return the arguments and the result of each assertion of a hidden test."""
    (check,) = (node for node in ast.parse(test).body if isinstance(node, ast.FunctionDef))
    calls = []
    for node in check.body:
        match node:
            case ast.Assert(test=ast.Compare(left=ast.Call(args=args), comparators=[right])):
                calls.append(([ast.literal_eval(arg) for arg in args], ast.literal_eval(right)))
    return calls


def _arguments(rng: random.Random, num: int) -> list[Any]:
    numbers = [rng.randint(0, 9) for _ in range(rng.randint(0, 6))]
    return [numbers, *(rng.randint(1, 7) for _ in range(num - 1))]


def _results(source: str, calls: list[list[Any]]) -> list[int | None]:
    """Return the result of each call of a function that :class:`_Writer` wrote.

    The result is None if the function reads a name that has no value yet.
    """
    names, results = dict[str, Any](), list[int | None]()
    exec(source, names)  # faster than SmallFunction, and no model wrote it
    function = names[ast.parse(source).body[0].name]  # type: ignore[attr-defined]
    for arguments in calls:
        try:
            results.append(function(*arguments))
        except NameError:
            results.append(None)
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
