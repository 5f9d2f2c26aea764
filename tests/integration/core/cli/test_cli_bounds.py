"""What the command line is given and cannot use is refused in one line, without a traceback."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.audited_runs import END, Run, ticket

from rollart_core.cli import main

Cli = Callable[..., tuple[int, str]]
LONG = "a/" * 2500


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process; return exit code and stderr."""
    monkeypatch.setenv("COLUMNS", "300")

    def inner(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), capsys.readouterr().err

    return inner


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with trajectories on a shard and in the journal."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder)
    for group in range(40):
        run.train(group, run.finish(ticket(group), group))
    run.journal.decided(END)
    run.journal.close()
    (folder / "config.yaml").write_text(
        "env: frozenlake\nmodel: {kind: new}\nstop: {batches: 2}\ntask_seeds: by_split\n"
    )
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "/dev/zero"),
        ("run", "/dev/zero", "--dry-run"),
        ("eval", "/dev/zero"),
        ("run", LONG),
        ("run", f"{'x' * 5000}.yaml", "--dry-run"),
        ("run", "--resume", LONG),
        ("run", "a.yaml", "x" * 5000),
        *((name, LONG) for name in ("audit", "diagnose", "export", "plot", "eval", "check")),
        ("view", LONG),
        ("plan", LONG),
        ("play", LONG),
        ("bench", LONG),
        ("list", LONG),
        ("info", LONG),
        ("scale", LONG, "engines=1"),
    ],
    ids=lambda arguments: " ".join(a[:12] for a in arguments),
)
def test_a_path_that_is_none_is_one_line(rollart: Cli, arguments: tuple[str, ...]) -> None:
    code, said = rollart(*arguments)
    assert code in (1, 2)
    assert said.startswith(("Error: ", "Usage: "))
    assert len([line for line in said.splitlines() if line.startswith("Error")]) == 1
    assert "Traceback" not in said


def _truncated(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])


def _overwritten(journal: Path) -> None:
    content = bytearray(journal.read_bytes())
    noise = random.Random(3)
    for _ in range(len(content) // 200):
        content[noise.randrange(4096, len(content))] = noise.randrange(256)
    journal.write_bytes(content)


def _garbage(journal: Path) -> None:
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE batches SET group_ids = '[1'")
        db.execute("UPDATE events SET payload = 'x', kind = 'guard_tripped'")
        db.execute("UPDATE tickets SET task = 'x'")
        db.execute("UPDATE meta SET value = '[' WHERE key = 'config'")
    db.close()


def _other(journal: Path) -> None:
    journal.write_bytes(b"no database at all" * 500)


@pytest.mark.parametrize("spoil", [_truncated, _overwritten, _garbage, _other])
@pytest.mark.parametrize(
    "command",
    [
        ("audit",),
        ("diagnose",),
        ("export", "--out", "x.jsonl"),
        ("plot", "--out", "x.png"),
        ("run", "--dry-run", "--resume"),
    ],
    ids=lambda command: command[0],
)
def test_a_journal_that_is_damaged_is_one_line(
    rollart: Cli,
    run_dir: Path,
    spoil: Callable[[Path], None],
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run_dir.parent)
    spoil(run_dir / "journal.db")
    code, said = rollart(*command, "run")
    if spoil is _garbage and command[0] in ("export", "plot"):
        return  # which read other rows
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith("Error: ")
    assert "journal" in said
    assert not Path("x.jsonl").exists()


@pytest.mark.parametrize("spoil", [_truncated, _other, Path.unlink])
def test_a_shard_that_is_damaged_is_one_line(
    rollart: Cli, run_dir: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    shards = sorted((run_dir / "trajectories").glob("*.parquet"))
    assert shards
    spoil(shards[0])
    code, said = rollart("export", "run", "--out", "x.jsonl")
    assert (code, said.count("\n")) == (1, 1), said
    assert "part-000001.parquet is damaged or incomplete" in said
    assert sorted(path.name for path in Path().iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: " + "9" * 5000, "not YAML"),
        ("a: !!int x", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\n" + "".join(
            f"{chr(99 + i)}: &{chr(99 + i)} [{', '.join([f'*{chr(98 + i)}'] * 9)}]\n"
            for i in range(8)
        ), "more than 100000 values"),
        ("x: 1\n" * 300_000, "is longer than the limit of 1048576 bytes"),
    ],
    ids=["nested", "digits", "int", "timestamp", "anchors", "long"],
)  # fmt: skip
def test_yaml_that_cannot_be_read_is_one_line(
    rollart: Cli, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    code, err = rollart("run", str(path), "--dry-run")
    assert (code, err.count("\n")) == (1, 1), err[:500]
    assert said in err
