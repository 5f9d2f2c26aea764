#!/usr/bin/env python3
"""Move modules and rename names in the whole working tree.

    scripts/restructure/restructure.py

Reads three tab-separated tables in this folder; ``#`` starts a comment:

    moves.tsv    old path, new path
    names.tsv    module (by its new name), old name, new name: one class, function or constant
    tokens.tsv   old identifier, new identifier: everywhere in Python files, and in backticks

Moves files with ``git mv``, rewrites imports, dotted names in strings and paths in all tracked text
files, and renames. Run it on a clean working tree; then sort imports and format:

    ruff check --select I,RUF022 --fix . && ruff format .
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ("", "envs/", "rewards/", "algorithms/", "plugins/")
"""The folders of packages."""
PACKAGED = ("rollart_core/", "envs/", "rewards/", "algorithms/", "plugins/")
LEFT_ALONE = ("CHANGELOG.md", "scripts/restructure/")
TEXT = (".py", ".md", ".toml", ".yaml", ".yml", ".tsv", ".in", ".sh", ".c", ".jinja", ".txt", "")
PACKAGES = {
    "rollart_core/config": "Run configs: sections, loading, and what is checked before a run.",
    "rollart_core/config/validation": "What must hold between the keys of a run config.",
    "rollart_core/plugins": "Plugins: hooks, loading, registry of ids, manifests, API versions.",
    "rollart_core/gateway": "The HTTP endpoint that agent programs send their requests to.",
    "rollart_core/inference": "Routing of generation requests to inference engines.",
    "rollart_core/store": "What a run writes and reads again: journal, trajectories, checkpoints.",
    "plugins/rollart_ray": "Runs on a Ray cluster.",
    "plugins/rollart_cpu": "Inference and training kernels for CPUs.",
    "plugins/rollart_cpu/inference": "A decoder for CPUs.",
    "plugins/rollart_cpu/training": "Training kernels for CPUs.",
    **dict.fromkeys(("plugins/rollart_bench", "plugins/rollart_planner"), ""),
    **dict.fromkeys(("plugins/rollart_registry", "plugins/rollart_sandboxes"), ""),
    **dict.fromkeys(("plugins/rollart_testing", "plugins/rollart_view"), ""),
    "plugins/rollart_view/cli": "The commands of this package.",
    "plugins/rollart_sandboxes/cli": "The commands of this package.",
    "plugins/rollart_sandboxes/judging": "Judging functions in a sandbox.",
}
"""New packages -> the docstring of each. If it is empty, the package is moved."""
GONE = {
    "rollart_core/train/__init__.py": "rollart_core.training",
    "rollart_core/scaffold/__init__.py": "rollart_core.cli",
}
"""Packages that become part of another package."""


def main() -> None:
    """Move, rewrite and rename."""
    moves = dict(rows("moves.tsv", 2))
    files = tracked()
    unknown = sorted(set(moves) - set(files))
    if unknown:
        sys.exit(f"not in the tree: {', '.join(unknown)}")
    modules = {module_of(a): module_of(b) for a, b in moves.items() if a.endswith(".py")}
    modules |= {module_of(a): b for a, b in GONE.items()}
    tokens, names = dict(rows("tokens.tsv", 2)), list(rows("names.tsv", 3))
    members = renamed_members(modules, tokens, names)
    for old, new in moves.items():
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    for old in GONE:
        git("rm", "-q", "-f", old)
    for package, doc in PACKAGES.items():
        new_package(package, doc)
    rewrite = Rewriting(modules, moves)
    for path in text_files():
        change(path, rewrite)
    rename_tokens(tokens)
    rename_names(names)
    new = {module_of(path) for path in tracked() if path.endswith(".py")}
    old = {a: b for a, b in modules.items() if a not in new}
    table = {"modules": old, "members": members}
    path = ROOT / "rollart_core/plugins/old_names.json"
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def renamed_members(
    modules: Mapping[str, str], tokens: Mapping[str, str], names: Iterable[tuple[str, ...]]
) -> dict[str, dict[str, str]]:
    """Return the new name of each module -> its old names -> the new names.

    Only moved modules are included: in others, no public name is renamed.
    """
    members: dict[str, dict[str, str]] = defaultdict(dict)
    moved = set(modules.values())
    for module, old, new in names:
        if old[0] != "_" and module in moved:
            members[module][old] = new
    for path in tracked():
        module = module_of(path)
        if path.endswith(".py") and path.startswith(PACKAGED) and module in modules:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            for name in (n for n in defined(tree) if n in tokens and n[0] != "_"):
                members[modules[module]][name] = tokens[name]
    return dict(members)


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions, classes and constants of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def rows(name: str, num: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table."""
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            cells = tuple(line.split("\t"))
            if len(cells) != num:
                sys.exit(f"{name}: {line!r} has {len(cells)} cells, not {num}")
            yield cells


def git(*arguments: str) -> str:
    """Run git in the working tree."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def tracked() -> list[str]:
    """Return the paths of all files in the index."""
    return git("ls-files").splitlines()


def text_files() -> Iterator[Path]:
    """Yield the files to rewrite."""
    for name in tracked():
        path = ROOT / name
        if path.suffix in TEXT and not name.startswith(LEFT_ALONE) and path.is_file():
            yield path


def module_of(path: str) -> str:
    """Return the dotted name of a Python file."""
    for folder in SOURCES[1:]:
        path = path.removeprefix(folder)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def new_package(folder: str, doc: str) -> None:
    """Make a folder a package, and mark a top-level package as typed."""
    init = ROOT / folder / "__init__.py"
    if doc and not init.exists():
        init.parent.mkdir(parents=True, exist_ok=True)
        init.write_text(f'"""{doc}"""\n', encoding="utf-8")
        git("add", str(init))
    if folder.count("/") == 1 and folder.startswith("plugins/"):
        (ROOT / folder / "py.typed").touch()
        git("add", f"{folder}/py.typed")


def change(path: Path, rewrite: Rewriting) -> None:
    """Rewrite one file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    changed = rewrite.python(text) if path.suffix == ".py" else rewrite.text(text)
    if changed != text:
        path.write_text(changed, encoding="utf-8")


class Rewriting:
    """Replaces old names of modules and files with the new ones."""

    def __init__(self, modules: Mapping[str, str], paths: Mapping[str, str]) -> None:
        """Compile the patterns; longer names take precedence."""
        self._modules = modules
        folders = {
            old.removesuffix("/__init__.py"): new.removesuffix("/__init__.py")
            for old, new in paths.items()
            if old.endswith("/__init__.py")
        }
        self._paths = {**folders, **paths}
        dotted = "|".join(re.escape(m) for m in sorted(modules, key=len, reverse=True))
        slashed = "|".join(re.escape(p) for p in sorted(self._paths, key=len, reverse=True))
        self._pattern = re.compile(
            rf"(?<![\w.])(?P<module>{dotted})(?!\w)|(?<![\w])(?P<path>{slashed})(?![\w])"
        )

    def text(self, text: str) -> str:
        """Rewrite dotted names and paths."""
        return self._pattern.sub(self._replaced, text)

    def _replaced(self, found: re.Match[str]) -> str:
        if found["module"]:
            return self._modules[found["module"]]
        return self._paths[found["path"]]

    def python(self, text: str) -> str:
        """Rewrite a Python file: also imports of moved modules from their packages."""
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return self.text(text)
        starts = line_starts(text)
        parts: list[str] = []
        done = 0
        for node in sorted(imports_from(tree), key=lambda n: (n.lineno, n.col_offset)):
            moved = [a for a in node.names if f"{node.module}.{a.name}" in self._modules]
            if node.level or not moved:
                continue
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            parts += [self.text(text[done:begin]), self._import(node, moved)]
            done = end
        return "".join([*parts, self.text(text[done:])])

    def _import(self, node: ast.ImportFrom, moved: list[ast.alias]) -> str:
        lines = []
        rest = [a for a in node.names if a not in moved]
        if rest:
            parent = self._modules.get(node.module or "", node.module or "")
            lines.append(f"from {parent} import {', '.join(map(written, rest))}")
        for alias in moved:
            parent, _, leaf = self._modules[f"{node.module}.{alias.name}"].rpartition(".")
            name = alias.asname or alias.name
            shown = leaf if leaf == name else f"{leaf} as {name}"
            lines.append(f"from {parent} import {shown}" if parent else f"import {shown}")
        return f"\n{' ' * node.col_offset}".join(lines)


def written(alias: ast.alias) -> str:
    """Return an import alias as source text."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def imports_from(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yield all ``from ... import`` statements."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))


def line_starts(text: str) -> list[int]:
    """Return the offset of each line. AST columns count bytes, but lines with imports are ASCII."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def rename_tokens(names: Mapping[str, str]) -> None:
    """Rename identifiers in Python files; elsewhere in backticks, marks of tables, dotted names."""
    if not names:
        return
    arguments = re.compile(r"^(\s+)(" + "|".join(map(re.escape, names)) + r")(?=: )", flags=re.M)
    patched = re.compile(r'(setattr\([\w.]+, ")(' + "|".join(map(re.escape, names)) + r')(?=")')
    words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    dotted = re.compile(rf"(\brollart_\w+(?:\.\w+)*[.:]){words.pattern}")
    for path in text_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        changed = text
        if path.suffix == ".py":
            changed = with_tokens(changed, lambda at, token: names.get(token, token))
            changed = patched.sub(lambda m: m[1] + names[m[2]], changed)
            changed = arguments.sub(lambda m: m[1] + names[m[2]], changed)
        changed = dotted.sub(lambda m: m[1] + names[m[2]], changed)
        changed = IN_BACKTICKS.sub(lambda m: words.sub(lambda name: names[name[0]], m[0]), changed)
        if changed != text:
            path.write_text(changed, encoding="utf-8")


IN_BACKTICKS = re.compile(r"`[^`\n]+`|<!-- table: \S+ -->")


def with_tokens(text: str, renamed: Renamed) -> str:
    """Return a Python file with each identifier replaced by the result of a function.

    This includes identifiers in the braces of f-strings, in the strings of ``__all__`` and in
    strings that contain a program.
    """
    starts = line_starts(text)
    exported = lines_of_all(text)
    parts: list[str] = []
    done = 0
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            if token.type == tokenize.NAME:
                new = renamed(token.start, token.string)
            elif token.type != tokenize.STRING:
                continue
            elif token.start[0] in exported or OUR_IMPORT.search(token.string):
                new = names_in(token.string, renamed)
            elif F_STRING.match(token.string):
                new = IN_BRACES.sub(lambda m: names_in(m[0], renamed), token.string)
            else:
                continue
            if new != token.string:
                begin = starts[token.start[0] - 1] + token.start[1]
                parts += [text[done:begin], new]
                done = begin + len(token.string)
    except (tokenize.TokenError, IndentationError):
        return text
    return "".join([*parts, text[done:]])


Renamed = Callable[[tuple[int, int], str], str]
"""From the position and the text of an identifier to its new text."""
OUR_IMPORT = re.compile(r"(?m)^\s*(from|import) rollart_")
"""Found in the text of a program that imports our packages."""
F_STRING = re.compile(r"(?i)r?fr?['\"]")
IN_BRACES = re.compile(r"(?<!\{)\{(?!\{)[^{}]*\}")


def names_in(text: str, renamed: Renamed) -> str:
    """Rename all identifiers in a text."""
    return re.sub(r"(?<!\w)[A-Za-z_]\w*", lambda m: renamed((0, 0), m[0]), text)


def lines_of_all(text: str) -> range:
    """Return the lines of ``__all__``; none for a template, which is not valid Python."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return range(0)
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return range(node.lineno, (node.end_lineno or 0) + 1)
    return range(0)


def rename_names(table: Iterable[tuple[str, ...]]) -> None:
    """Rename names of modules: at their definition, in imports, and after the module's name."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for module, old, new in table:
        names[module][old] = new
    if not names:
        return
    for path in text_files():
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        changed = dotted_names(text, names)
        if path.suffix == ".py":
            changed = names_of_file(changed, module_of(str(path.relative_to(ROOT))), names)
        if changed != text:
            path.write_text(changed, encoding="utf-8", errors="surrogateescape")


def dotted_names(text: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Rename in ``module:Name`` and ``module.Name``, in strings and documents."""
    for module, olds in names.items():
        if module in text:
            for old, new in olds.items():
                text = re.sub(
                    rf"(?<![\w.]){re.escape(module)}([.:]){old}\b", rf"{module}\1{new}", text
                )
        path = module.replace(".", "/") + ".py: "
        if path in text:
            for old, new in olds.items():
                text = re.sub(rf"(?<={re.escape(path)}){old}\b", new, text)
    return text


def names_of_file(text: str, module: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Rename in one Python file the names that it defines or imports."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    plain: dict[str, str] = dict(names.get(module, {}))
    behind: dict[str, Mapping[str, str]] = {}
    kept: set[str] = set()
    others: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                new = names.get(node.module, {}).get(alias.name)
                if new and not alias.asname:
                    plain[alias.name] = new
                elif new:
                    kept.add(alias.name)
                else:
                    others.add((alias.lineno, alias.col_offset))
                whole = f"{node.module}.{alias.name}"
                if whole in names:
                    behind[alias.asname or alias.name] = names[whole]
    if not plain and not behind and not kept:
        return text
    attributes = {
        (node.end_lineno, (node.end_col_offset or 0) - len(node.attr)): (
            behind[node.value.id].get(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id in behind
            else None
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    keywords = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg
    }

    def renamed(at: tuple[int, int], token: str) -> str:
        if at in attributes:
            return attributes[at] or token
        if at in keywords or at in others:
            return token
        return plain.get(token, token)

    changed = with_tokens(text, renamed)
    for old, new in plain.items():
        changed = re.sub(rf"(?<=`){old}(?=[`.(])", new, changed)
    return changed


if __name__ == "__main__":
    main()
