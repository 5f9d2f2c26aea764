"""The documentation says what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rollart_core import hookspecs
from rollart_core.cli import COMMANDS
from rollart_core.plugins import plugins


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
    text = (repo_root / "docs/plugins.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`$\n\n(.+)$", text, flags=re.MULTILINE)
    written = dict(headings)
    assert sorted(written) == sorted(signatures().values())
    for name, heading in signatures().items():
        assert written[heading] == inspect.getdoc(getattr(hookspecs, name))


def test_commands_shown_in_the_documents_exist(repo_root: Path) -> None:
    pages = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *repo_root.glob("docs/*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        shown = re.findall(r"(?:^|`|\$ )\s*rollart ([a-z][a-z-]*)\b", text, flags=re.MULTILINE)
        assert set(shown) <= {*COMMANDS, *plugins().registered("commands")}, page.name


def test_the_table_of_baselines_has_a_row_for_every_built_in_environment(repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- baselines -->")[2].partition("<!-- end -->")[0]
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert head == "| environment | tasks | oracle | no-op | random | trained |"
    known = plugins().registered("environments").values()
    ours = {r.spec.id for r in known if r.plugin.distribution == "rollart"}
    assert {row.split("`")[1] for row in rows} == ours
    assert all(row.count("|") == head.count("|") for row in rows)
