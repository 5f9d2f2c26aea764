#!/usr/bin/env python3
"""Measure the structure of the source: sizes, imports, cycles.

    scripts/structure.py            a table
    scripts/structure.py --json     one JSON object, with the names behind each count
    scripts/structure.py --run      also the path of an episode, measured in a run (takes seconds;
                                    requires what `make setup` installs): see call_paths.py

Counts files that git tracks. Code lines exclude blank lines, comments and docstrings. Imports
inside functions count too, but not those under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "plugins/", "envs/", "rewards/", "algorithms/")
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
LONG = 60
"""Functions with more lines are too long."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    code_lines: int
    functions: tuple[tuple[str, int], ...]
    """Name and number of lines of each."""

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__.py`` of a package."""
        return self.path.name == "__init__.py"


def main() -> None:
    """Print the measurements."""
    found = measures(read_modules())
    if "--run" in sys.argv[1:]:
        found |= run_measures()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if isinstance(value, list):
            value = len(value)
        if not isinstance(value, dict):
            print(f"{name:40} {value}")
    for package, lines in found["code lines by package"].items():
        print(f"{package:40} {lines}")


def read_modules() -> dict[str, Module]:
    """Return all modules of the packages, by name."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = {}
    for path in listed.stdout.splitlines():
        for folder in FOLDERS:
            relative = path.removeprefix(folder)
            if path.startswith(folder) and relative.startswith("rollart_"):
                module = _read(ROOT / path, relative)
                found[module.name] = module
                break
    return found


def _read(path: Path, relative: str) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    functions = tuple(
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return Module(name, path, tree, len(text.splitlines()), _code_lines(text, tree), functions)


def _code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that contain code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    return len(lines)


def importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return each module -> the modules that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in imported(module, modules):
            if name != module.name:
                found[name].add(module.name)
    return found


def imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield our modules that a module imports."""
    pending: list[ast.AST] = [module.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules:
                    yield whole
                elif node.module in modules:
                    yield node.module
        pending += ast.iter_child_nodes(node)


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def measures(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the measurements by name."""
    by_package: dict[str, int] = defaultdict(int)
    for module in modules.values():
        by_package[module.package] += module.code_lines
    files = sorted(m.lines for m in modules.values() if not m.is_package)
    functions = sorted(n for m in modules.values() for _, n in m.functions)
    used = importers(modules)
    edges: dict[str, set[str]] = defaultdict(set)
    for name, others in used.items():
        for other in others:
            edges[other].add(name)
    core = ROOT / "rollart_core"
    once = sorted(n for n, o in used.items() if len(o) == 1 and not modules[n].is_package)
    return {
        "files": len(modules),
        "lines of a file, median": _at(files, 0.5),
        "lines of a file, p90": _at(files, 0.9),
        "lines of a function, median": _at(functions, 0.5),
        "lines of a function, p90": _at(functions, 0.9),
        f"functions over {LONG} lines": sorted(
            f"{m.name}.{f} ({n})" for m in modules.values() for f, n in m.functions if n > LONG
        ),
        "code lines of the core": by_package["rollart_core"],
        "modules with one importer": once,
        "import cycles": cycles(edges),
        "loose files in rollart_core": sorted(
            m.path.name for m in modules.values() if m.path.parent == core
        ),
        "folders in rollart_core": sorted(
            {m.name.split(".")[1] for m in modules.values() if m.path.parent.parent == core}
        ),
        "code lines by package": dict(sorted(by_package.items())),
    }


def run_measures() -> dict[str, Any]:
    """Return the measurements of a run."""
    from call_paths import call_paths, files_of

    paths = call_paths()
    return {
        "files of an episode": files_of(paths),
        **{f"frames of {call}": paths[call] for call in ("env.step", "reward.score")},
    }


def _at(values: Sequence[int], quantile: float) -> int:
    return values[min(len(values) - 1, int(quantile * len(values)))] if values else 0


if __name__ == "__main__":
    main()
