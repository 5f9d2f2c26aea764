"""The documentation says what the code does."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from rollart_core.cli import COMMANDS
from rollart_core.plugins import hookspecs
from rollart_core.plugins.manager import plugins

NAMED = re.compile(r"`((?:\w+/)+\w+\.py): ([\w.]+)`")


def signatures() -> dict[str, str]:
    """Return every hook with its signature, as a heading writes it."""
    return {
        name: f"{name}{inspect.signature(hook)}".replace("'", "")
        for name, hook in vars(hookspecs).items()
        if name.startswith("rollart_")
    }


def test_every_hook_has_a_heading_with_its_exact_signature_and_its_sentence(
    repo_root: Path,
) -> None:
    text = (repo_root / "docs/reference/hooks.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`$\n\n(.+)$", text, flags=re.MULTILINE)
    written = dict(headings)
    assert sorted(written) == sorted(signatures().values())
    for name, heading in signatures().items():
        assert written[heading] == inspect.getdoc(getattr(hookspecs, name))


def test_commands_shown_in_the_documents_exist(repo_root: Path) -> None:
    named = [repo_root / "README.md", repo_root / "CONTRIBUTING.md"]
    pages = [*named, *repo_root.glob("docs/**/*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        shown = re.findall(r"(?:^|`|\$ )\s*rollart ([a-z][a-z-]*)\b", text, flags=re.MULTILINE)
        assert set(shown) <= {*COMMANDS, *plugins().registered("commands")}, page.name


def test_the_table_of_baselines_has_a_row_for_every_built_in_environment(repo_root: Path) -> None:
    text = (repo_root / "docs/reference/baselines.md").read_text(encoding="utf-8")
    table = text.partition("<!-- baselines -->")[2].partition("<!-- end -->")[0]
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert head == "| environment | tasks | oracle | no-op | random | trained |"
    known = plugins().registered("environments").values()
    ours = {r.spec.id for r in known if r.plugin.distribution == "rollart"}
    assert {row.split("`")[1] for row in rows} == ours
    assert all(row.count("|") == head.count("|") for row in rows)


def defined(tree: ast.Module, dotted: str) -> bool:
    """Return whether a module defines a function, a class, or a method by its dotted name."""
    body: list[ast.stmt] = tree.body
    for name in dotted.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((n for n in body if isinstance(n, kinds) and n.name == name), None)
        if found is None:
            return False
        body = found.body
    return True


def test_the_walk_along_an_episode_names_what_is_there_in_15_files(repo_root: Path) -> None:
    text = (repo_root / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    walk = text.partition("## One episode, from reset to the update it causes")[2]
    walk = walk.partition("\n## ")[0]
    listed = walk.partition("\nBefore the first episode")[0]
    steps = re.split(r"^\d+\. ", listed, flags=re.MULTILINE)[1:]
    files = [{path for path, _ in NAMED.findall(step)} for step in steps]
    assert [len(paths) for paths in files] == [1] * len(steps), "each step is one file"
    assert len(set.union(*files)) == len(steps) <= 15
    assert [step.count(". ") for step in steps] == [0] * len(steps), "each step is one sentence"
    missing = []
    for path, name in NAMED.findall(walk):
        tree = ast.parse((repo_root / path).read_text(encoding="utf-8"))
        missing += [] if defined(tree, name) else [f"{path}: {name}"]
    assert not missing


def test_commands_of_our_plugins_say_the_same_in_help_and_in_the_list() -> None:
    registered = plugins().registered("commands")
    brought = {name for name, command in COMMANDS.items() if command.entry_point is None}
    assert {"check", "play", "plan", "registry"} <= brought <= set(registered)
    assert {name: registered[name].spec.summary for name in brought} == {
        name: COMMANDS[name].summary for name in brought
    }
