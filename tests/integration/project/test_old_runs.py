"""Runs of an earlier release: they are audited, exported, evaluated and gone on with.

They were made before the modules got their present names, and have been moved to another folder
since; `old_runs/README.md` says how. What is expected of them is read from their journals by SQL,
not by the code under test.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import Program, start_program
from support.patient_ray import patient_ray
from support.sandbox_types import no_bubblewrap

OLD_RUNS = Path(__file__).with_name("old_runs")
BATCHES = 8
"""How many each of them is to train."""
PER_BATCH = 2 * 4
"""Trajectories: groups, and members of each."""
EVALUATED = 4


@dataclass(frozen=True)
class OldRun:
    """What is in a packed run."""

    name: str
    version: int
    """Of its checkpoint, which holds as many batches."""
    trained: int
    """Batches that it had trained when it ended."""
    killed: bool
    """Whether it had no time to write its model and a shard."""


RUNS = {
    run.name: run
    for run in (
        OldRun("inline", version=3, trained=4, killed=True),
        OldRun("isolated", version=3, trained=4, killed=True),
        OldRun("lora", version=5, trained=5, killed=False),
        OldRun("ray", version=5, trained=5, killed=False),
    )
}
NAMES = list(RUNS)


@pytest.fixture
def run_dir(name: str, tmp_path: Path) -> Path:
    """An old run, in a folder that is not the one it was made in."""
    with tarfile.open(OLD_RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / name


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run_dir / "journal.db")) as db:
        return db.execute(query).fetchall()


def rollart(*argv: str | Path) -> dict[str, Any]:
    """Return what a command prints with ``--json``."""
    return printed(start_program(*map(str, argv), "--json"))


def printed(process: Program) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def exported(run_dir: Path, out: Path) -> list[dict[str, Any]]:
    account = rollart("export", run_dir, "--tokens", "--out", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert account["written"] == len(lines)
    return lines


TRAINED_BATCHES = """SELECT batch, group_ids, ticket_ids, life FROM batches
                     WHERE state = 'trained' ORDER BY batch"""
WENT_BACK = "SELECT policy_version, payload FROM events WHERE kind = 'rolled_back'"
DISPATCHED = "SELECT COUNT(*) FROM events WHERE kind = 'dispatched'"
TRAINED = "SELECT ticket_id FROM tickets WHERE state = 'trained'"
TRAJECTORIES = """SELECT ticket_id, attempt, status, reward, num_tokens, oldest_version
                  FROM trajectories WHERE status != 'failed' ORDER BY 1"""


@pytest.mark.parametrize("name", NAMES)
def test_its_journal_is_audited(name: str, run_dir: Path) -> None:
    tickets = dict(rows(run_dir, "SELECT state, COUNT(*) FROM tickets GROUP BY state"))
    account = rollart("audit", run_dir)
    assert (account["ok"], account["violations"]) == (True, [])
    assert account["trained"] == tickets["trained"] == RUNS[name].trained * PER_BATCH
    assert account["batches"] == RUNS[name].trained
    assert [(account["attempts"],)] == rows(run_dir, DISPATCHED)
    assert account["num_tickets"] == sum(tickets.values())
    assert bool(account["ended"]) is not RUNS[name].killed
    assert sum(account["aborted"].values()) == tickets.get("aborted", 0)
    assert set(account["staleness"]) <= {"0", "1"}


@pytest.mark.parametrize("name", NAMES)
def test_its_trajectories_are_exported(name: str, run_dir: Path, tmp_path: Path) -> None:
    in_journal = rows(run_dir, TRAJECTORIES)
    assert bool(rows(run_dir, "SELECT seq FROM blobs")) is RUNS[name].killed
    assert (run_dir / "trajectories").exists() is not RUNS[name].killed
    lines = exported(run_dir, tmp_path / "out.jsonl")
    found = [
        (
            *(line[key] for key in ("ticket_id", "attempt", "status", "reward")),
            sum(len(sample["token_ids"]) for sample in line["samples"]),
            line["oldest_version"],
        )
        for line in lines
    ]
    assert sorted(found) == in_journal
    assert {ticket for (ticket,) in rows(run_dir, TRAINED)} <= {row[0] for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_model_is_evaluated(name: str, run_dir: Path, tmp_path: Path) -> None:
    skip_without_sandbox(name)
    of_killed = ("--model", run_dir / "model") if RUNS[name].killed else ()
    report = rollart("eval", run_dir, *of_killed, "--out", tmp_path / "eval")
    (cell,) = report["cells"]
    assert (cell["episodes"], cell["failed"]) == (EVALUATED, 0)
    assert Path(report["model"]) == run_dir / ("model" if RUNS[name].killed else "model-trained")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inline", "isolated", "lora"])
def test_it_is_gone_on_with(name: str, run_dir: Path, tmp_path: Path) -> None:
    skip_without_sandbox(name)
    before = rows(run_dir, TRAINED_BATCHES)
    assert_went_on(RUNS[name], run_dir, rollart("run", "--resume", run_dir), before)
    assert len(exported(run_dir, tmp_path / "out.jsonl")) >= BATCHES * PER_BATCH


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ray"])
def test_it_is_gone_on_with_on_ray(name: str, run_dir: Path) -> None:
    before = rows(run_dir, TRAINED_BATCHES)
    main = "from rollart_core.cli import main; main()"
    command = [sys.executable, "-c", main, "run", "--resume", str(run_dir), "--json"]
    with patient_ray():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    assert_went_on(RUNS[name], run_dir, printed(process), before)


def skip_without_sandbox(name: str) -> None:
    if name == "isolated" and (why := no_bubblewrap()):
        pytest.skip(why)


def assert_went_on(
    run: OldRun, run_dir: Path, report: dict[str, Any], before: list[tuple[Any, ...]]
) -> None:
    """Assert that a run went on from its checkpoint to its end."""
    assert (report["ok"], report["stop_reason"]) == (True, "done")
    assert report["batches"] == BATCHES - run.version
    after = rows(run_dir, TRAINED_BATCHES)
    assert [batch for batch, *_ in after] == list(range(BATCHES))
    assert after[: run.version] == before[: run.version]
    assert {life for *_, life in after[run.version :]} == {1}
    ((version, payload),) = rows(run_dir, WENT_BACK)
    assert (version, json.loads(payload)["reason"]) == (run.version, "resumed")
    (model,) = run_dir.glob("model-trained/model.safetensors")
    assert model.stat().st_size > 0
    account = rollart("audit", run_dir)
    assert (account["ok"], account["trained"], account["open"]) == (True, BATCHES * PER_BATCH, 0)
    assert account["batches_rolled_back"] >= run.trained - run.version
