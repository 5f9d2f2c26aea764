"""Names and prose use standard terms: words of the old private vocabulary are refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("rollart_core", "plugins", "envs", "rewards", "algorithms", "scripts", "docs")
REFUSED = {
    "berth": "slot",
    "box": "sandbox",
    "bury": "mark as lost",
    "guest": "subscriber",
    "lane": "queue",
    "obituary": "exit reason",
    "road": "transport",
    "room": "capacity",
    "seat": "slot",
    "tell": "notify",
    "wall": "isolation",
}
"""Word that no identifier may have as a component -> standard term. Plurals count as well."""
OLD_NAMES = "old_names.py"
PREVIOUS_KEYS = {"max_boxes", "num_seats", "episodes_per_box", "weight_road"}
"""Previous names of config keys, which are still accepted."""
WALL_TIMES = re.compile(r"_?(max_|train_)?wall_s(_left)?|WALL_S")
"""Names of wall-clock times, which is a standard term."""
OTHERS = {
    ("rollart_core/cli/output.py", "box"): "an argument of rich",
    ("rollart_core/cli/progress.py", "box"): "an argument of rich",
    ("plugins/rollart_testing/cli.py", "box"): "an argument of rich",
    ("plugins/rollart_plugins/adapters/sessions/gym.py", "Box"): "a space of gymnasium",
    ("plugins/rollart_sandboxes/pool/lease.py", "box"): "the previous name of an attribute",
    ("envs/rollart_envs/swe/task_folder.py", "tell"): "a method of files",
}
"""Names with a refused component that belong to another package or remain for compatibility."""
GAMES = ("toy/sokoban.py", "toy/config.py")
"""Files of games that have boxes, walls and rooms."""
PROSE = ("berth", "obituary", "dirge", "whoever", "anew", "what becomes of", "what became of")
"""Refused in documents, docstrings and messages."""


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every name that a module defines or uses, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in PREVIOUS_KEYS:
            continue
        for name in ("id", "attr", "name", "arg"):
            if isinstance(found := getattr(node, name, None), str):
                yield getattr(node, "lineno", 0), found


def components(name: str) -> set[str]:
    """Return the words of a name, in lower case and without a plural's ending."""
    words = {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return words | {w.removesuffix("s") for w in words} | {w.removesuffix("es") for w in words}


def test_components_of_names() -> None:
    assert {"held", "box"} <= components("HeldBox")
    assert {"seat", "seats"} <= components("_num_seats")
    assert "road" not in components("broadcast")


def test_no_identifier_uses_the_private_vocabulary(repo_root: Path) -> None:
    wrong = []
    for folder in FOLDERS:
        for path in sorted((repo_root / folder).rglob("*.py")):
            shown = path.relative_to(repo_root)
            if path.name == OLD_NAMES or str(path).endswith(GAMES):
                continue
            named = [(0, path.stem), *identifiers(ast.parse(path.read_text(encoding="utf-8")))]
            for line, name in named:
                if WALL_TIMES.fullmatch(name) or (str(shown), name) in OTHERS:
                    continue
                for word in components(name) & set(REFUSED):
                    wrong.append(f"{shown}:{line}: {name}: not {word!r} but {REFUSED[word]}")
    assert not wrong, "\n".join(wrong)


def prose(path: Path) -> str:
    """Return what people read in a file: a document as a whole, of code its strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    tree = ast.parse(text)
    found = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return "\n".join(value for value in found if isinstance(value, str))


def test_prose_uses_no_words_of_the_private_vocabulary(repo_root: Path) -> None:
    pages = [repo_root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    pages += (repo_root / "docs").rglob("*.md")
    for folder in FOLDERS:
        pages += (repo_root / folder).rglob("*.py")
    refused = re.compile(rf"\b({'|'.join(PROSE)})\b", flags=re.IGNORECASE)
    wrong = [
        f"{page.relative_to(repo_root)}: {found[0]!r}"
        for page in pages
        if page.name != OLD_NAMES
        for found in refused.finditer(prose(page))
    ]
    assert not wrong, "\n".join(wrong)
