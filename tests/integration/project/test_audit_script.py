"""The audit that shares no code with RollArt finds each broken promise."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rollart_core.store.journal_schema import SCHEMA

SCRIPT = Path(__file__).parents[3] / "scripts" / "audit_journal.py"
TRAJECTORY = (
    "INSERT INTO trajectories (time_s, ticket_id, attempt, group_id, status, reward, num_tokens, "
    "num_loss_tokens, num_turns, oldest_version, start_version, wall_s, failure_kind, life) "
    "VALUES (0, ?, ?, 'g0', ?, ?, 9, 3, 1, ?, 0, 1, ?, 0)"
)
EVENT = "INSERT INTO events (time_s, kind, ticket_id, attempt, payload) VALUES (0, ?, ?, ?, ?)"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run of one batch of two tickets, one of which was replayed after a loss."""
    journal = sqlite3.connect(tmp_path / "journal.db")
    journal.executescript(SCHEMA)
    journal.execute("INSERT INTO meta VALUES ('config', '{\"max_staleness\": 1}')")
    for ticket, attempt in (("g0.0", 0), ("g0.1", 1)):
        values = (ticket, int(ticket[-1]), attempt)
        journal.execute(
            "INSERT INTO tickets VALUES (?, 'g0', ?, '[]', 'trained', ?, 0, 0, '', 0, 0)", values
        )
        for each in range(attempt + 1):
            journal.execute(EVENT, ("dispatched", ticket, each, "{}"))
        journal.execute(TRAJECTORY, (ticket, attempt, "finished", 0.5, 0, None))
    journal.execute(TRAJECTORY, ("g0.1", 0, "failed", None, 0, "infrastructure"))
    journal.execute(EVENT, ("part_died", None, None, '{"part": "env"}'))
    journal.execute(EVENT, ("StopRun", None, None, "{}"))
    batch = '["g0"]', "[0]", '["g0.0", "g0.1"]', "[0, 1]"
    journal.execute("INSERT INTO batches VALUES (1, 0, 0, 'trained', ?, ?, ?, ?, 0)", batch)
    journal.commit()
    journal.close()
    return tmp_path


def audited(path: Path) -> tuple[int, dict[str, object]]:
    ended = subprocess.run([sys.executable, "-I", SCRIPT, path], capture_output=True, text=True)
    return ended.returncode, json.loads(ended.stdout or "{}")


def test_a_run_that_keeps_its_promises_passes(run_dir: Path) -> None:
    code, found = audited(run_dir)
    assert (code, found["broken"]) == (0, [])
    assert (found["trained"], found["attempts"], found["losses"]) == (2, 3, {"env": 1})
    assert found["failures"] == {"infrastructure": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("INSERT INTO batches SELECT 2, 0, 1, state, group_ids, staleness, ticket_ids, attempts, "
         "life FROM batches", "g0.0 is trained 2 times"),
        ("UPDATE batches SET attempts = '[0, 0]'", "g0.1#0 has 0 finished records of 1"),
        ("UPDATE batches SET batch = 2", "g0.0#0 has version 0, bound 1"),
        ("UPDATE batches SET life = 1", "g0.0#0 is from life 0, its batch from 1"),
        ("UPDATE batches SET group_ids = '[\"g1\"]'", "g0.0#0 is from group g0, which is"),
        ("UPDATE tickets SET state = 'queued' WHERE idx = 0", "g0.0 is queued after the end"),
        ("UPDATE trajectories SET reward = NULL", "g0.0#0 has the reward None"),
        ("DELETE FROM events WHERE attempt = 1", "g0.1#1 is recorded but was never dispatched"),
        ("DELETE FROM events WHERE kind = 'part_died'", "1 failures are infrastructure, but 0"),
        ("DELETE FROM tickets WHERE idx = 1", "g0.1 was dispatched and is unknown"),
    ],
)  # fmt: skip
def test_each_broken_promise_is_found(run_dir: Path, change: str, says: str) -> None:
    journal = sqlite3.connect(run_dir / "journal.db")
    journal.execute(change)
    journal.commit()
    journal.close()
    code, found = audited(run_dir)
    assert code == 1
    assert says in str(found["broken"])


def test_where_there_is_no_journal_is_one_line(tmp_path: Path) -> None:
    assert audited(tmp_path) == (2, {})


def test_it_imports_nothing_of_rollart() -> None:
    assert "rollart" not in "".join(
        line for line in SCRIPT.read_text().splitlines() if "import" in line.split("#")[0].split()
    )
