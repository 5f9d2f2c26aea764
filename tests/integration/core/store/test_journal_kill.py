"""What was committed is there after the process was killed."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import read_trajectories

CONFIG = {"mode": "async", "max_staleness": 1, "name": "test"}

WRITER = """
import sys
from pathlib import Path
from rollart_core.store.journal import Journal
from rollart_core.types import Task, Ticket, Trajectory

journal = Journal(Path(sys.argv[1]), {}, rows_per_shard=50)
for i in range(90):
    group = f"g{i:07d}"
    ticket = Ticket(group + ".0", Task("fake/Env-v0", "train", i, 0), group, 0)
    journal.dispatched(ticket, 0)
    journal.trajectory(Trajectory(ticket, "finished", reward=1.0))
    if i in (60, 89):
        journal.flush()
print("flushed", flush=True)
while True:
    journal.event("busy")
"""


def shards(run_dir: Path) -> set[str | None]:
    """Return the shards that hold trajectories; None: the journal holds some itself."""
    with closing(sqlite3.connect(run_dir / "journal.db")) as db:
        return {name for (name,) in db.execute("SELECT shard FROM trajectories")}


def test_a_killed_process_leaves_everything_committed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        os.kill(process.pid, signal.SIGKILL)
    before = [t.ticket.ticket_id for t in read_trajectories(tmp_path)]
    assert before == [f"g{i:07d}.0" for i in range(90)]
    assert shards(tmp_path) == {"part-000001.parquet", None}
    Journal(tmp_path, CONFIG).close()  # takes up what no shard holds yet
    assert None not in shards(tmp_path)
    assert [t.ticket.ticket_id for t in read_trajectories(tmp_path)] == before
