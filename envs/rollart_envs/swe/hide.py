"""Remove tests from a test file, as if they had not been written yet.

Takes: a file's source and the names of tests. Gives: the source without them. Never: changes
anything else in it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from rollart_envs.swe.source_lines import source_lines

_Block = Sequence[ast.stmt]


def without_tests(source: str, names: Collection[str]) -> str | None:
    """Return a source without some tests; None if removing lines cannot do that.

    Args:
        source: The source of the file.
        names: ``test_a`` or ``TestClass::test_b``; an inherited test is not found.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found = dict(_tests(tree.body, ""))
    if not set(names) <= set(found):
        return None
    gone = [found[name] for name in names]
    gone += _emptied(tree.body, gone)
    lines = source_lines(source)
    for node in gone:
        for number in range(_first_line(node) - 1, (node.end_lineno or node.lineno)):
            lines[number] = ""
    left = "".join(lines)
    try:
        still = {name for name, _ in _tests(ast.parse(left).body, "")}
    except SyntaxError:
        return None
    return None if still & set(names) else left  # a name can be defined twice


def tests_in(source: str) -> dict[str, ast.stmt]:
    """Return the functions of a test file by name, methods as ``TestClass::test_b``."""
    try:
        return dict(_tests(ast.parse(source).body, ""))
    except (SyntaxError, ValueError):
        return {}


def test_name(test: str) -> tuple[str, str]:
    """Return the file and the name of a test's id: ``a.py::T::t[x]`` -> ``a.py``, ``T::t``."""
    path, _, name = test.split("[", 1)[0].partition("::")
    return path, name


tests_in.__test__ = False  # type: ignore[attr-defined]  # pytest would collect them as tests
test_name.__test__ = False  # type: ignore[attr-defined]


def _tests(block: _Block, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in block:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{prefix}{node.name}::")


def _emptied(block: _Block, gone: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the classes that would have only a docstring left."""
    classes = [node for node in block if isinstance(node, ast.ClassDef)]
    emptied: list[ast.stmt] = []
    for node in classes:
        inner = [*gone, *_emptied(node.body, gone)]
        left = [child for child in node.body if child not in inner and not _is_text(child)]
        if not left and len(node.body) > 0 and any(child in inner for child in node.body):
            emptied.append(node)
    return emptied


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
