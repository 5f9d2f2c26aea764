"""What was committed is there after any end, and a journal that cannot write says so."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rollart_core.errors import JournalError
from rollart_core.scheduling.events import AbortEpisode, DropGroup, LoseTicket, StopRun
from rollart_core.store import journal as journal_module
from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_core.store.trajectory_files import pack
from rollart_core.types import (
    Failure,
    FailureKind,
    Group,
    Sample,
    Task,
    Ticket,
    Trajectory,
)

CONFIG = {"mode": "async", "max_staleness": 1, "name": "test"}
TASK = Task("fake/Env-v0", "train", 3, 7)


def ticket(group: int, index: int, attempt: int = 0) -> Ticket:
    group_id = f"g{group:07d}"
    return Ticket(f"{group_id}.{index}", TASK, group_id, index, attempt)


def finished(t: Ticket, version: int = 0, num_tokens: int = 6) -> Trajectory:
    row = np.full(num_tokens, version, np.int32)
    mask = np.ones(num_tokens, np.bool_)
    sample = Sample(row, mask, row.astype(np.float32), row, row)
    return Trajectory(t, "finished", (sample,), reward=0.5, score=1.0, success=True)


def failed(t: Ticket) -> Trajectory:
    return Trajectory(t, "failed", failure=Failure(FailureKind.SANDBOX, "sandbox.exec", "gone"))


def states(run_dir: Path) -> dict[str, str]:
    with JournalReader(run_dir) as reader:
        return {t.ticket_id.removeprefix("g000000"): t.state for t in reader.tickets()}


def shards(run_dir: Path) -> list[tuple[str | None, int | None]]:
    """Return on which shard, and in which row of it, each trajectory is."""
    with closing(sqlite3.connect(run_dir / "journal.db")) as db:
        return db.execute("SELECT shard, shard_row FROM trajectories ORDER BY seq").fetchall()


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    for i in range(2):
        journal.dispatched(ticket(0, i), 4)
        journal.trajectory(finished(ticket(0, i), 4))
    journal.batch_taken([Group("g0000000", TASK, (finished(ticket(0, 0), 4),), 2)], 5)
    journal.batch_trained(5)
    journal.metrics(9, 5, {"train/loss": 0.25, "train/odd": float("nan")})
    journal.event("swapped", {"stall_s": 0.5}, policy_version=6)
    journal.close()
    journal.close()
    with JournalReader(tmp_path) as reader:
        assert reader.config() == CONFIG
        assert [(t.state, t.batch) for t in reader.tickets()] == [
            ("trained", 5),
            ("finished", None),
        ]
        (batch,) = reader.batches()
        assert (batch.batch, batch.state, batch.staleness) == (5, "trained", (1,))
        assert (batch.group_ids, batch.ticket_ids) == (("g0000000",), ("g0000000.0",))
        attempt, outcome = reader.attempts()[0], reader.outcomes()[0]
        assert (attempt.num_tokens, attempt.oldest_version, outcome.success) == (6, 4, True)
        assert shards(tmp_path) == [("part-000001.parquet", 0), ("part-000001.parquet", 1)]
        assert [m.value for m in reader.metrics()] == [0.25, None]
        assert [m.value for m in reader.metrics("train/loss")] == [0.25]
        kinds = [e.kind for e in reader.events()]
        assert kinds == [*["dispatched", "finished"] * 2, "batch_trained", "swapped"]
        assert reader.events(kind="swapped")[0].payload == '{"stall_s": 0.5}'
        assert reader.next_ordinal() == 1
    assert [t.ticket.ticket_id for t in read_trajectories(tmp_path)] == ["g0000000.0", "g0000000.1"]


def test_tickets_follow_what_becomes_of_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    for i in range(5):
        journal.dispatched(ticket(0, i), 0)
    journal.trajectory(failed(ticket(0, 0)))
    journal.dispatched(ticket(0, 0, attempt=1), 0)
    journal.trajectory(finished(ticket(0, 1)))
    journal.trajectory(failed(ticket(0, 2)))
    journal.decided(LoseTicket("g0000000.2", "sandbox: gone \udc80"))
    journal.decided(AbortEpisode("g0000000.3", "too_stale"))
    journal.trajectory(failed(ticket(0, 3)))  # what it says after that changes nothing
    journal.decided(DropGroup("g0000000", "too_stale"))
    journal.decided(StopRun("done", "done"))
    journal.close()
    assert states(tmp_path) == {
        "0.0": "running",
        "0.1": "dropped",
        "0.2": "lost",
        "0.3": "aborted",
        "0.4": "running",
    }
    with JournalReader(tmp_path) as reader:
        assert reader.tickets()[0].attempt == 1
        assert reader.tickets()[2].reason == "sandbox: gone \\udc80"
        decided = [e.kind for e in reader.events() if e.kind[0].isupper()]
        assert decided == [
            "LoseTicket",
            "AbortEpisode",
            "DropGroup",
            "StopRun",
        ]  # as of old journals


def test_going_back_queues_what_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    for batch in range(3):
        journal.dispatched(ticket(batch, 0), batch)
        trajectory = finished(ticket(batch, 0), batch)
        journal.trajectory(trajectory)
        journal.batch_taken([Group(f"g000000{batch}", TASK, (trajectory,), 1)], batch)
        journal.batch_trained(batch)
        journal.metrics(batch + 1, batch, {"train/loss": float(batch)})
    journal.dispatched(ticket(3, 0), 3)
    journal.dispatched(ticket(3, 1, attempt=2), 3)
    for group in (4, 5):
        journal.dispatched(ticket(group, 0), 3)
    journal.decided(AbortEpisode("g0000004.0", "stopped"))
    journal.trajectory(finished(ticket(5, 0), 3))
    journal.decided(DropGroup("g0000005", "filtered"))
    journal.close()
    journal = Journal(tmp_path, CONFIG)
    journal.rolled_back(1, "resumed")
    journal.close()
    found = states(tmp_path)
    assert found.pop("0.0") == "trained"
    assert found.pop("5.0") == "dropped"
    assert set(found.values()) == {"queued"}
    with JournalReader(tmp_path) as reader:
        assert [b.state for b in reader.batches()] == ["trained", "rolled_back", "rolled_back"]
        assert reader.next_ordinal() == 6
        assert [(g.group_id, g.attempts) for g in reader.returning()] == [
            ("g0000001", (1,)),
            ("g0000002", (1,)),
            ("g0000003", (1, 3)),
            ("g0000004", (1,)),
        ]
        assert [t.rolled_back for t in reader.tickets()] == [0, 1, 1, 0, 0, 0, 0]
        assert [m.value for m in reader.metrics("train/loss")] == [0.0]
        assert len(reader.metrics("train/loss", rolled_back=True)) == 3


def test_what_a_ticket_did_in_an_earlier_life_stays_on_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.dispatched(ticket(0, 0), 0)
    journal.trajectory(finished(ticket(0, 0)))
    journal.rolled_back(0, "the trainer was lost")
    journal.close()
    journal = Journal(tmp_path, CONFIG)  # the number of the life is read back
    journal.dispatched(ticket(0, 0, attempt=1), 0)
    journal.trajectory(finished(ticket(0, 0, attempt=1)))
    journal.close()
    with JournalReader(tmp_path) as reader:
        assert [(r.attempt, r.life) for r in reader.attempts()] == [(0, 0), (1, 1)]
        (row,) = reader.tickets()
        assert (row.state, row.attempt, row.life, row.reason) == ("finished", 1, 1, "")


def test_a_checkpoint_proves_that_the_batches_before_it_were_trained(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.dispatched(ticket(0, 0), 0)
    journal.trajectory(finished(ticket(0, 0)))
    journal.batch_taken([Group("g0000000", TASK, (finished(ticket(0, 0)),), 1)], 0)
    journal.rolled_back(1, "resumed")  # its end was not written before the power went
    journal.close()
    assert states(tmp_path) == {"0.0": "trained"}


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG, rows_per_shard=4)
    with JournalReader(tmp_path) as reader:
        for i in range(10):
            journal.trajectory(finished(ticket(0, i)))
            journal.flush()
            assert len(reader.attempts()) == i + 1
            assert [t.ticket.index for t in reader.trajectories()] == list(range(i + 1))
    journal.close()
    assert len(list((tmp_path / "trajectories").iterdir())) == 3


def test_a_kill_between_shard_and_commit_gives_no_doubles(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.trajectory(finished(ticket(0, 0)))
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:  # as if the last commit had not happened
        db.execute("UPDATE trajectories SET shard = NULL, shard_row = NULL")
        db.execute("INSERT INTO blobs VALUES (1, ?)", (pack(finished(ticket(0, 0))),))
    db.close()
    assert len(list(read_trajectories(tmp_path))) == 1
    Journal(tmp_path, CONFIG).close()
    assert len(list(read_trajectories(tmp_path))) == 1
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


def test_a_locked_database_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_S", 0.01)
    journal = Journal(tmp_path, CONFIG)
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.event("anything")
    with pytest.raises(JournalError, match=r"can no longer be written: .*database is locked"):
        journal.flush()
    with pytest.raises(JournalError, match="locked"):
        journal.event("more")
    with pytest.raises(JournalError, match="locked"):
        journal.close()
    other.close()
    assert not [t for t in threading.enumerate() if t.name == "journal"]


def test_a_full_disk_surfaces_and_keeps_what_was_committed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.event("early")
    journal.flush()
    journal._store._db.execute("PRAGMA max_page_count = 1")
    journal.event("late", {"text": "x" * 100_000})
    with pytest.raises(JournalError, match="full"):
        journal.close()
    with JournalReader(tmp_path) as reader:
        assert [e.kind for e in reader.events()] == ["early"]


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"not a run directory: it has no journal\.db"):
        JournalReader(tmp_path)
    (tmp_path / "journal.db").write_text("this is no database, however long it goes on" * 100)
    with pytest.raises(JournalError, match="is not the journal of a run"):
        JournalReader(tmp_path)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("CREATE TABLE notes (text)", r"is not the journal of a run, .*no such table: meta"),
        ("CREATE TABLE meta (version)", r"is not the journal of a run, .*no such column: key"),
        (
            "CREATE TABLE meta AS SELECT 'schema_version' AS key, 'first' AS value",
            r"has schema first; this release reads \d+",
        ),
    ],
)
def test_a_database_that_is_no_journal_is_told_as_that(
    tmp_path: Path, made: str, says: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute(made)
        db.commit()
    with pytest.raises(JournalError, match=says) as caught:
        JournalReader(tmp_path)
    assert "\n" not in str(caught.value)


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.event("late")


def test_an_error_of_who_reads_is_not_blamed_on_the_journal(tmp_path: Path) -> None:
    Journal(tmp_path, CONFIG).close()
    for error in (ValueError("mine"), KeyError("mine"), TypeError("mine")):
        with pytest.raises(type(error), match="mine"), JournalReader(tmp_path):
            raise error
        reader = JournalReader(tmp_path)
        with pytest.raises(type(error), match="mine"), reader, reader.snapshot():
            raise error


@pytest.mark.parametrize(
    ("damage", "read"),
    [
        ("UPDATE tickets SET attempt = 'x'", "tickets"),
        ("UPDATE tickets SET group_id = 'x'", "tickets"),
        ("UPDATE tickets SET reason = x'ff'", "tickets"),
        ("UPDATE tickets SET task = '['", "source_history"),
        ("UPDATE batches SET ticket_ids = '[1]'", "batches"),
        ("UPDATE batches SET attempts = '[]'", "batches"),
        ("UPDATE trajectories SET num_tokens = 'x'", "attempts"),
        ("UPDATE trajectories SET wall_s = 'x'", "outcomes"),
        ("UPDATE trajectories SET success = 'x'", "outcomes"),
        ("UPDATE trajectories SET shard = 3", "trajectories"),
        ("UPDATE metrics SET policy_version = 'x'", "metric_values"),
        ("UPDATE metrics SET policy_version = 'x'", "metrics"),
        ("UPDATE meta SET value = '{\"mode\": \"sync\"}' WHERE key = 'config'", "config"),
        ("DROP TABLE tickets", "next_ordinal"),
    ],
)
def test_damaged_content_is_a_journal_error_where_it_is_read(
    tmp_path: Path, damage: str, read: str
) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.dispatched(ticket(0, 0), 4)
    journal.trajectory(finished(ticket(0, 0), 4))
    journal.batch_taken([Group("g0000000", TASK, (finished(ticket(0, 0), 4),), 2)], 5)
    journal.metrics(1, 5, {"train/loss": 0.25})
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute(damage)
        db.commit()
    says = r"is damaged or incomplete"
    with JournalReader(tmp_path) as reader, pytest.raises(JournalError, match=says):
        list(getattr(reader, read)())
