"""Which files of this repository the result of some tests depends on: their import closure.

Takes: test files or folders. Gives: the repository's files that they import, directly or not,
anywhere in their code; modules that code names in strings (``"module:Class"``,
``"package.module"``), as plugin specs and entry points do; the data files in the folder of each
of these modules; and the modules that the manifest of a plugin package names. Never: imports
anything.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

SOURCES = (".", "envs", "rewards", "algorithms", "plugins", "tests")
"""Folders that modules are imported from, as pyproject.toml has them for packages and tests."""
MANIFEST = "rollart.yaml"
"""The file in which a plugin package names its classes."""
_NAME = re.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?::[\w.]*)?$")
_ENTRY_POINT = re.compile(r"\b([A-Za-z_]\w*(?:\.\w+)+):\w")


class Closure:
    """The modules of a repository, and what they depend on."""

    def __init__(self, root: Path) -> None:
        """Read nothing yet.

        Args:
            root: The folder of pyproject.toml.
        """
        self._root = root
        self._of_name = cache(self._file_of)

    def files(self, roots: Sequence[str]) -> list[Path]:
        """Return all files that these depend on, sorted, relative to the root.

        Args:
            roots: Files and folders. All Python files of a folder count, and its data files.

        Raises:
            FileNotFoundError: If one of them does not exist.
        """
        found: set[Path] = set()
        todo = [path for root in roots for path in self._all_of(self._root / root)]
        while todo:
            path = todo.pop()
            if path in found:
                continue
            found.add(path)
            if path.suffix == ".py":
                todo += self._depends_on(path)
                todo += self._nearby(path.parent)
            elif path.name == MANIFEST:
                names = _ENTRY_POINT.findall(path.read_text(encoding="utf-8"))
                todo += [file for name in names for file in self._modules(name)]
        return sorted(path.relative_to(self._root) for path in found)

    def _all_of(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: there is no such file")
        return [file for file in path.rglob("*") if file.is_file() and not _made(file)]

    def _depends_on(self, path: Path) -> Iterator[Path]:
        tree = ast.parse(path.read_bytes(), str(path))
        for name in self._names(path, tree):
            yield from self._modules(name)
        if path == self._root / "rollart_core" / "plugins" / "manager.py":
            yield from self._plugins()
        # Fixtures reach a test without an import.
        yield from (
            folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").is_file()
        )

    def _names(self, path: Path, tree: ast.AST) -> Iterator[str]:
        """Yield the dotted names that a module imports, or names in a string."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(path, node)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and (matched := _NAME.match(str(node.value))):
                yield matched[1]

    def _base(self, path: Path, node: ast.ImportFrom) -> str:
        """Return the absolute name of what is imported from."""
        if not node.level:
            return node.module or ""
        parts: list[str] = []
        folder = path.parent
        while (folder / "__init__.py").is_file():
            parts.insert(0, folder.name)
            folder = folder.parent
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _modules(self, name: str) -> Iterator[Path]:
        """Yield the files that importing a name executes: the module's and its packages'."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if file := self._of_name(".".join(parts[:end])):
                yield file

    def _file_of(self, name: str) -> Path | None:
        relative = Path(*name.split("."))
        for source in SOURCES:
            for file in (relative.with_suffix(".py"), relative / "__init__.py"):
                if (path := self._root / source / file).is_file():
                    return path.resolve()
        return None

    def _plugins(self) -> list[Path]:
        """Return the modules that the entry points of this distribution name."""
        return [path for source in SOURCES for path in (self._root / source).glob("*/plugin.py")]

    def _nearby(self, folder: Path) -> Iterator[Path]:
        """Yield the data files in the folder of a module."""
        if folder == self._root:
            return
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".py" and not _made(file):
                yield file


def fingerprint(root: Path, files: Iterable[Path], *further: object) -> str:
    """Return a hash of the contents of files, their names, and whatever else is given."""
    digest = hashlib.sha256(repr(further).encode())
    for file in files:
        content = hashlib.sha256((root / file).read_bytes()).hexdigest()
        digest.update(f"{file} {content}\n".encode())
    return digest.hexdigest()[:16]


def _made(file: Path) -> bool:
    return "__pycache__" in file.parts or file.suffix in {".pyc", ".log"}
