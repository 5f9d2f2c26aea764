"""Real packages become tasks; their sdists lie in the wheelhouse, and nothing is fetched."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from support.sandbox_types import no_bubblewrap

from rollart_envs.swe.cli import app


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a box can read, whoever owns it."""
    with tempfile.TemporaryDirectory(prefix="rollart-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def sdists(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folder = repo_root / ".wheelhouse" / "sdists"
    if not (folder / ".complete").exists():
        pytest.skip("no sdists: `make wheelhouse` fetches them")
    if why := no_bubblewrap():
        pytest.skip(why)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder.parent))
    return sorted(folder.glob("*.tar.gz"))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sdists_become_sound_tasks(
    sdists: list[Path], open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(sdists) >= 2
    all_become_sound_tasks(sdists, 2, open_folder, capsys)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_sdist_becomes_a_sound_task(
    sdists: list[Path], open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_become_sound_tasks(sdists[:1], 1, open_folder, capsys)


def all_become_sound_tasks(
    sdists: list[Path], count: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Make so many tasks of each, and check them."""
    num_tasks = ("--count", str(count))
    for sdist in sdists:
        made = swe(capsys, "make", str(sdist), "--out", str(folder), *num_tasks, "--json")
        assert made["tasks"] == count, made
    report = swe(capsys, "validate", str(folder / "tasks.jsonl"), "--json")
    assert report["sound"] == count * len(sdists), report
    rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    assert len({row["repo"] for row in rows}) == len(sdists)
    for row in rows:
        assert len(row["PASS_TO_PASS"]) > len(row["FAIL_TO_PASS"]) > 0


def swe(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Run ``rollart swe`` and return what it prints as JSON."""
    capsys.readouterr()
    command = typer.main.get_command(app)
    command.main(list(arguments), "rollart swe", standalone_mode=False)
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found
