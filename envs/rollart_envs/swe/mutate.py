"""Put bugs into working code: small changes of Python functions, applied to the text.

Takes: a module's source. Gives: :class:`Mutation`, and the source with some of them applied. Never:
changes the formatting elsewhere, or a docstring, an annotation or a decorator.

The kinds are common human mistakes (after SWE-smith's procedural ones, arXiv 2504.21798, section
2.2): a wrong operator, condition, bound, constant, return value, exception, order of arguments, a
similar function instead of the right one, a missing statement or branch. A kind takes one node with
its children and yields the changes it would make.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rollart_envs.swe.source_lines import source_lines

Node = ast.expr | ast.stmt


@dataclass(frozen=True, slots=True)
class Change:
    """The characters ``start:end`` of a source become ``new``."""

    start: int
    end: int
    new: str
    line: int


class Text:
    """A source whose nodes can be located by character."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source_lines(source)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the character at a line, from 1, and a column in UTF-8 bytes, from 0."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def start(self, node: Node) -> int:
        """Return where a node begins."""
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Node) -> int:
        """Return where a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: Node) -> str:
        """Return a node's own text."""
        return self.source[self.start(node) : self.end(node)]

    def instead(self, node: Node, new: str) -> Change:
        """Return the change of a node's text."""
        return Change(self.start(node), self.end(node), new, node.lineno)

    def between(self, left: Node, right: Node, old: str, new: str) -> Iterator[Change]:
        """Yield the change of an operator between two nodes."""
        start, end = self.end(left), self.start(right)
        gap = self.source[start:end]
        pattern = r"\s+".join(map(re.escape, old.split()))
        bound = r"\b" if old[0].isalpha() else ""
        found = list(re.finditer(rf"{bound}{pattern}{bound}", gap))
        if len(found) == 1 and "#" not in gap:
            at = start + found[0].start()
            yield Change(at, start + found[0].end(), new, self.source.count("\n", 0, at) + 1)

    def whole_lines(self, node: ast.stmt) -> tuple[int, int] | None:
        """Return the characters of a statement's lines; None if it shares a line."""
        assert node.end_lineno is not None
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        before = self.source[start : self.start(node)]
        after = self.source[self.end(node) : end].strip()
        return None if before.strip() or (after and not after.startswith("#")) else (start, end)


_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, tuple[str, ...]]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_OPERATORS: Final[dict[type[ast.operator], tuple[str, tuple[str, ...]]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("//", "*")),
    ast.FloorDiv: ("//", ("/", "%")),
    ast.Mod: ("%", ("//",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
_SIBLINGS: Final = (
    *(("min", "max"), ("any", "all"), ("startswith", "endswith"), ("lstrip", "rstrip")),
    *(("find", "rfind"), ("split", "rsplit"), ("partition", "rpartition"), ("upper", "lower")),
    *(("append", "extend"), ("keys", "values"), ("ljust", "rjust"), ("index", "rindex")),
    *(("removeprefix", "removesuffix"), ("appendleft", "append"), ("popleft", "pop")),
    *(("union", "intersection"), ("floor", "ceil"), ("isdigit", "isalpha"), ("add", "discard")),
)
_OTHERS: Final = {a: b for pair in _SIBLINGS for a, b in (pair[::-1], pair)}
_ERRORS: Final = {
    "ValueError": "TypeError",
    "TypeError": "ValueError",
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "AttributeError": "TypeError",
    "StopIteration": "IndexError",
    "RuntimeError": "ValueError",
    "NotImplementedError": "RuntimeError",
    "OverflowError": "ValueError",
}


def _comparison(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        sides = pairwise([node.left, *node.comparators])
        for (left, right), operator in zip(sides, node.ops, strict=True):
            old, others = _COMPARISONS[type(operator)]
            for new in others:
                yield from text.between(left, right, old, new)


def _arithmetic(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node.left):
        old, others = _OPERATORS[type(node.op)]
        for new in others:
            yield from text.between(node.left, node.right, old, new)
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        old, others = _OPERATORS[type(node.op)]
        yield from text.between(node.target, node.value, f"{old}=", f"{others[0]}=")


def _boolean(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            yield from text.between(left, right, old, new)


def _condition(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text.instead(node, text.of(node.operand))
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.BoolOp):
            plain = text.of(test)
            yield text.instead(test, f"not ({plain})" if _is_wide(test) else f"not {plain}")


def _constant(node: ast.AST, text: Text) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield text.instead(node, str(not node.value))
    elif type(node.value) is int and text.of(node).isdecimal():
        yield text.instead(node, str(node.value + 1))
        if node.value > 0:
            yield text.instead(node, str(node.value - 1))


def _sign(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield text.instead(node, text.of(node.operand))


def _bound(node: ast.AST, text: Text) -> Iterator[Change]:
    """One too many or too few, in a range, a length or a slice."""
    if isinstance(node, ast.Slice):
        for end in (node.lower, node.upper):
            if isinstance(end, ast.Name | ast.Attribute | ast.Call):
                yield text.instead(end, f"{text.of(end)} + 1")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return
    if node.func.id == "len":
        yield text.instead(node, f"({text.of(node)} - 1)")
    elif node.func.id == "range" and node.args and not isinstance(node.args[-1], ast.Starred):
        last = node.args[1] if len(node.args) > 1 else node.args[0]
        plain = f"({text.of(last)})" if _is_wide(last) else text.of(last)
        yield text.instead(last, f"{plain} - 1")


def _returned(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.Return) and node.value is not None:
        if isinstance(node.value, ast.Constant) and node.value.value is None:
            return
        yield text.instead(node.value, "None")
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            yield from _swapped(node.value.elts, text)


def _arguments(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.Call):
        plain = node.args
        for left, right in pairwise(plain):
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                yield from _swapped([left, right], text)


def _sibling(node: ast.AST, text: Text) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Name) and called.id in _OTHERS:
        yield text.instead(called, _OTHERS[called.id])
    elif isinstance(called, ast.Attribute) and called.attr in _OTHERS:
        end = text.end(called)
        if text.source[end - len(called.attr) : end] == called.attr:
            yield Change(end - len(called.attr), end, _OTHERS[called.attr], node.lineno)


def _error(node: ast.AST, text: Text) -> Iterator[Change]:
    raised: ast.expr | None = None
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    elif isinstance(node, ast.ExceptHandler):
        raised = node.type
    if isinstance(raised, ast.Name) and raised.id in _ERRORS:
        yield text.instead(raised, _ERRORS[raised.id])


def _jump(node: ast.AST, text: Text) -> Iterator[Change]:
    if isinstance(node, ast.Break):
        yield text.instead(node, "continue")
    elif isinstance(node, ast.Continue):
        yield text.instead(node, "break")


def _missing(node: ast.AST, text: Text) -> Iterator[Change]:
    """A missing statement, guard or else."""
    for body in _bodies(node):
        for statement in body:
            if isinstance(statement, _REMOVABLE) and not _is_docstring(statement):
                yield from _removed(statement, body, text)
    if isinstance(node, ast.If | ast.For | ast.While) and node.orelse:
        yield from _without_else(node, text)


_REMOVABLE = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.If, ast.Assign)


def _removed(statement: ast.stmt, body: Sequence[ast.stmt], text: Text) -> Iterator[Change]:
    if isinstance(statement, ast.If) and statement.orelse:
        return
    if text.of(statement).startswith("elif"):
        return
    if isinstance(statement, ast.Assign) and not isinstance(
        statement.targets[0], ast.Attribute | ast.Subscript
    ):
        return  # linters detect an undefined name
    lines = text.whole_lines(statement)
    if len(body) == 1:
        yield text.instead(statement, "pass")
    elif lines is not None:
        yield Change(*lines, "", statement.lineno)


def _without_else(node: ast.If | ast.For | ast.While, text: Text) -> Iterator[Change]:
    first, last = node.orelse[0], node.orelse[-1]
    if isinstance(node, ast.If) and text.of(first).startswith("elif"):
        return
    gap = text.source[text.end(node.body[-1]) : text.start(first)]
    found = re.fullmatch(r"[^\n#]*\n((?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*else[ \t]*:\s*)", gap)
    lines = text.whole_lines(last)
    if found and lines is not None:
        yield Change(text.start(first) - len(found[1]), lines[1], "", first.lineno)


def _bodies(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and not isinstance(node, ast.ClassDef):
            yield body


def _swapped(pair: Sequence[ast.expr], text: Text) -> Iterator[Change]:
    left, right = pair
    one, two = text.of(left), text.of(right)
    if one != two:
        middle = text.source[text.end(left) : text.start(right)]
        yield Change(text.start(left), text.end(right), f"{two}{middle}{one}", left.lineno)


def _is_wide(node: ast.expr) -> bool:
    return isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.BinOp | ast.Compare)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


KINDS: Final[dict[str, Callable[[ast.AST, Text], Iterator[Change]]]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "boolean": _boolean,
    "condition": _condition,
    "constant": _constant,
    "sign": _sign,
    "bound": _bound,
    "returned": _returned,
    "arguments": _arguments,
    "sibling": _sibling,
    "error": _error,
    "jump": _jump,
    "missing": _missing,
}
"""Name -> function that yields the changes at a node."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one function."""

    kind: str
    """A key of :data:`KINDS`."""
    function: str
    """Its qualified name: ``Class.method``, ``outer.inner``."""
    function_line: int
    """The first line of its code, including decorators, as in ``co_firstlineno``."""
    line: int
    start: int
    """The characters ``start:end`` of the source become ``new``."""
    end: int
    new: str


@dataclass(frozen=True, slots=True)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef
    name: str

    @property
    def line(self) -> int:
        return min([self.node.lineno, *(d.lineno for d in self.node.decorator_list)])


def mutations(source: str, kinds: Iterable[str] = KINDS) -> tuple[Mutation, ...]:
    """Return every change that can give another program, in the order of the source.

    Args:
        source: A module.
        kinds: The kinds of changes, keys of :data:`KINDS`.

    Raises:
        SyntaxError: If the source is not Python.
    """
    tree = ast.parse(source)
    text = Text(source)
    found = (
        Mutation(kind, function.name, function.line, c.line, c.start, c.end, c.new)
        for function in _functions(tree, "")
        for kind, c in _changes(function, text, kinds)
    )
    return tuple(sorted(set(found), key=lambda m: (m.start, m.end, m.kind, m.new)))


def mutated(source: str, chosen: Iterable[Mutation]) -> str:
    """Return a source with mutations in it; they must not overlap."""
    at = len(source)
    for mutation in sorted(chosen, key=lambda m: m.start, reverse=True):
        if mutation.end > at:
            raise ValueError(f"line {mutation.line}: two mutations overlap")
        source = source[: mutation.start] + mutation.new + source[mutation.end :]
        at = mutation.start
    return source


def is_another_program(source: str, other: str) -> bool:
    """Return whether ``other`` is Python, and a different program from ``source``."""
    try:
        return ast.dump(ast.parse(other)) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


def _functions(node: ast.AST, prefix: str) -> Iterator[_Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield _Function(child, name)
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def _changes(function: _Function, text: Text, kinds: Iterable[str]) -> Iterator[tuple[str, Change]]:
    wanted = [(kind, KINDS[kind]) for kind in kinds]
    for node in _nodes(function.node):
        for kind, propose in wanted:
            for change in propose(node, text):
                yield kind, change


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield a function's own nodes: none of inner functions, annotations, docstrings, f-strings.

    Before Python 3.12 the positions inside an f-string are not those of the source.
    """
    waiting: list[ast.AST] = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
    waiting += _without_docstring(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.ClassDef) or _is_function(node):
            continue
        yield node
        annotation = getattr(node, "annotation", None)
        waiting += [child for child in ast.iter_child_nodes(node) if child is not annotation]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text else body
