"""Bugs for working code: small changes of Python functions, made in the text by way of the tree.

Takes: a module's source. Gives: :class:`Mutation`, and the source with some of them in it. Never:
touches the formatting outside what it changes, or a docstring, an annotation or a decorator.

The kinds are those that people make (after SWE-smith's procedural ones, arXiv 2504.21798, section
2.2): a wrong operator, condition, bound, constant, return value, exception, order of arguments, a
function taken for its sibling, a statement or branch that is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollart_envs.swe.mutate_kinds import KINDS, Change, Text


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one function."""

    kind: str
    """A key of ``mutate_kinds.KINDS``."""
    function: str
    """Its qualified name: ``Class.method``, ``outer.inner``."""
    function_line: int
    """The line where its code begins, decorators included, as ``co_firstlineno`` has it."""
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


def mutations(source: str) -> tuple[Mutation, ...]:
    """Return every change that may give another program, in the order of the source.

    Raises:
        SyntaxError: The source is no Python.
    """
    tree = ast.parse(source)
    text = Text(source)
    found = (
        Mutation(kind, function.name, function.line, c.line, c.start, c.end, c.new)
        for function in _functions(tree, "")
        for kind, c in _changes(function, text)
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
    """Tell whether ``other`` is Python, and not the same program as ``source``."""
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


def _changes(function: _Function, text: Text) -> Iterator[tuple[str, Change]]:
    for node in _nodes(function.node):
        for kind, propose in KINDS.items():
            for change in propose(node, text):
                yield kind, change


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield a function's own nodes: none of inner functions, annotations, docstrings, f-strings.

    Before Python 3.12 the places of what is in an f-string are not those of the source.
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
