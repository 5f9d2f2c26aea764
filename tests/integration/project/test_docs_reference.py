"""The reference pages list what runs record."""

from __future__ import annotations

import ast
import re
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

OLD_RUNS = ("inline", "ray", "lora", "isolated")
CALLS_WITH_A_KIND = {"event", "_event", "on_event", "_on_event", "_say", "notify", "_notify"}
KIND = re.compile(r"[a-z]+(_[a-z]+)*")


def listed(page: Path, first_column_of: str = "") -> set[str]:
    """Return the names in the first column of a page's tables, of one heading or of all."""
    text = page.read_text(encoding="utf-8").partition(first_column_of)[2]
    names: set[str] = set()
    for row in re.findall(r"^\| (`.+?`) \|", text, flags=re.MULTILINE):
        found = re.findall(r"`([^`]+)`", row)
        folder = found[0].rpartition("/")[0]
        names |= {name if "/" in name or not folder else f"{folder}/{name}" for name in found}
    return names


@pytest.fixture(scope="module")
def journals(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the journals of the packed runs."""
    folder = tmp_path_factory.mktemp("journals")
    for name in OLD_RUNS:
        packed = repo_root / f"tests/integration/project/old_runs/{name}.tar.xz"
        with tarfile.open(packed) as tar:
            members = [m for m in tar.getmembers() if Path(m.name).name.startswith("journal.db")]
            tar.extractall(folder, members=members, filter="data")
    return [folder / name / "journal.db" for name in OLD_RUNS]


def recorded(journals: list[Path], query: str) -> set[str]:
    found: set[str] = set()
    for journal in journals:
        with closing(sqlite3.connect(journal)) as db:
            found |= {name for (name,) in db.execute(query)}
    return found


def test_every_metric_that_runs_recorded_is_listed(repo_root: Path, journals: list[Path]) -> None:
    names = listed(repo_root / "docs/reference/metrics.md", "# Metrics")
    patterns = [re.sub(r"[A-Z]{2,}", "[^ ]+", re.escape(name)) for name in names]
    metrics = recorded(journals, "SELECT DISTINCT name FROM metrics")
    assert len(metrics) > 80
    assert not [m for m in sorted(metrics) if not any(re.fullmatch(p, m) for p in patterns)]


def test_every_kind_of_event_is_listed(repo_root: Path, journals: list[Path]) -> None:
    names = listed(repo_root / "docs/reference/journal.md", "## Kinds of events")
    kinds = recorded(journals, "SELECT DISTINCT kind FROM events")
    assert {"dispatched", "finished", "batch_trained"} <= kinds
    assert sorted((kinds | kinds_in_the_code(repo_root)) - names) == []


def kinds_in_the_code(repo_root: Path) -> set[str]:
    """Return the literal kinds of calls that record an event."""
    found: set[str] = set()
    for path in (repo_root / "rollart_core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called, first = node.func, node.args[0]
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            kind = str(first.value) if isinstance(first, ast.Constant) else ""
            if name in CALLS_WITH_A_KIND and KIND.fullmatch(kind):
                found.add(kind)
    return found
