"""The journal of a run: SQLite, one writer thread, group commit.

    any thread --call--> queue --> writer thread: BEGIN, up to 256 calls or 50 ms, COMMIT
                                        |  a trajectory: summary row + compressed blob
                                        +--> a full shard: write Parquet, rename, delete blobs

Takes: the records of a run, as they happen. Gives: ``journal.db`` and ``trajectories/*.parquet``.
Never: hides an error. Committed records survive a kill at any time. If a write fails (disk full,
locked), every later call raises :class:`JournalError`.
:class:`rollart_core.store.journal_reader.JournalReader` can read it while it is written.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeAlias

from rollart_core.errors import JournalError, first_line
from rollart_core.scheduling.events import AbortEpisode, DropGroup, LoseTicket, StopRun
from rollart_core.store.journal_schema import (
    FILE,
    OPEN_STATES,
    ROLLED_BACK,
    SCHEMA,
    SCHEMA_VERSION,
    STOPPED,
    config_digest,
)
from rollart_core.store.trajectory_files import (
    FOLDER,
    ShardWriter,
    as_bool,
    as_float,
    clean_text,
    pack,
    trajectory_bytes,
    unpack,
)
from rollart_core.types import Group, Ticket, Trajectory

LOCK_TIMEOUT_S = 10.0
COMMIT_S = 0.05
"""Maximum time between a call and its commit, if the disk is fast enough."""
COMMIT_RECORDS = 256
"""Maximum number of calls in one commit."""
MAX_WAITING = 16_384
"""Maximum number of calls in the queue of the writer; the next call blocks."""

_Args = ParamSpec("_Args")
_Call: TypeAlias = Callable[["JournalStore"], None]
_Item: TypeAlias = _Call | threading.Event | None
"""A write; or a flush, whose event is set after the commit of all earlier writes; None: the end."""


class Journal:
    """Writes the journal; all methods except ``flush`` and ``close`` return immediately."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, object],
        *,
        rows_per_shard: int = 512,
    ) -> None:
        """Open the journal of a run; create it if it does not exist.

        Args:
            run_dir: The run directory.
            config: The resolved run config; an audit reads its ``mode`` and ``max_staleness``.
            rows_per_shard: Number of trajectories per Parquet file.

        Raises:
            JournalError: If it cannot be opened.
        """
        self._path = run_dir
        self._error: JournalError | None = None
        self._closed = False
        self._queue: queue.Queue[_Item] = queue.Queue(MAX_WAITING)
        try:
            self._store = JournalStore(run_dir, config, rows_per_shard=rows_per_shard)
        except Exception as e:
            raise self._as_error("cannot be opened", e) from e
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    # Records

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """Record that an attempt begins."""
        self._record(JournalStore.dispatched, ticket, start_version)

    def trajectory(self, trajectory: Trajectory) -> None:
        """Record that an attempt ended, successfully or not."""
        self._record(JournalStore.trajectory, trajectory)

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """Record that the scheduler gave something up, or ended the run."""
        self._record(JournalStore.decided, action)

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """Record that the trainer begins a batch at ``policy_version``."""
        # Computed here, so that a batch in the queue does not keep its tokens in memory.
        ids = tuple(g.group_id for g in groups)
        staleness = tuple(policy_version - g.oldest_version for g in groups)
        tickets = [t.ticket for g in groups for t in g.trajectories]
        attempts = {t.ticket_id: t.attempt for t in tickets}
        self._record(JournalStore.batch_taken, policy_version, ids, staleness, attempts)

    def batch_trained(self, policy_version: int) -> None:
        """Record that the batch taken at ``policy_version`` is trained and published."""
        self._record(JournalStore.batch_trained, policy_version)

    def metrics(self, train_step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one train_step."""
        rows = [(train_step, policy_version, name, float(v)) for name, v in metrics.items()]
        self._put(lambda store: store.metrics(rows))

    def event(
        self,
        kind: str,
        payload: Mapping[str, object] | None = None,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Record any other event; ``payload`` is plain JSON."""
        content = dict(payload or {})
        self._record(JournalStore.event, kind, content, policy_version=policy_version)

    def rolled_back(
        self,
        policy_version: int,
        reason: str,
        *,
        as_version: int | None = None,
        discards: tuple[int, int] | None = None,
    ) -> None:
        """Record a new incarnation of the run, from the checkpoint of ``policy_version``.

        Batches from that version on are marked as rolled back. Their groups are queued to run
        again, with the same ids and higher attempts. So is every group that was open, or that was
        dropped because the run was stopped.

        Args:
            policy_version: Version of the checkpoint.
            reason: The reason of the rollback.
            as_version: The new version of its weights. If None, the version stays the same.
            discards: The first version, and the one after the last, whose batches are discarded;
                their groups do not run again.
        """
        self._record(
            JournalStore.rolled_back,
            policy_version,
            reason,
            as_version=as_version,
            discards=discards,
        )

    # Durability

    def flush(self) -> None:
        """Wait until all records so far are committed.

        Raises:
            JournalError: If they cannot be committed.
        """
        done = threading.Event()
        self._put(done)
        done.wait()
        self._check()

    def close(self) -> None:
        """Commit, write the last shard and end the thread; may be called twice.

        Raises:
            JournalError: If a record could not be written, now or before.
        """
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._check()

    def _record(
        self,
        method: Callable[Concatenate[JournalStore, float, _Args], None],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> None:
        """Queue a call of a store's method for the writer thread, with the current time."""
        now = time.time()
        self._put(lambda store: method(store, now, *args, **kwargs))

    def _put(self, item: _Call | threading.Event) -> None:
        self._check()
        if self._closed:
            raise JournalError(f"the journal of {self._path} is closed")
        self._queue.put(item)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # The writer thread

    def _work(self) -> None:
        item: _Item = self._queue.get()
        while item is not None:
            item = self._commit_group(item)
        self._try(self._store.finish)
        self._store.close()

    def _commit_group(self, first: _Call | threading.Event) -> _Item:
        """Commit ``first`` and the items that follow soon; return the first of the next group."""
        item: _Item = first
        end_s = time.monotonic() + COMMIT_S
        num_calls, idle = 0, False
        self._try(self._store.begin)
        while callable(item) and num_calls < COMMIT_RECORDS:
            self._try(partial(item, self._store))
            num_calls += 1
            try:
                item = self._queue.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                idle = True
                break
        self._try(self._store.commit)
        if isinstance(item, threading.Event):
            item.set()
            idle = True
        return self._queue.get() if idle else item

    def _try(self, work: Callable[[], None]) -> None:
        """Do ``work`` unless an earlier write failed; then the queue is only drained."""
        if self._error is not None:
            return
        try:
            work()
        except Exception as e:
            self._error = self._as_error("can no longer be written", e)

    def _as_error(self, what: str, error: Exception) -> JournalError:
        why = f"{type(error).__name__}: {first_line(str(error))}"
        return JournalError(f"the journal of {self._path} {what}: {why}")


KINDS_OF_DECISIONS: Final[Mapping[type, str]] = {
    AbortEpisode: "AbortEpisode",
    DropGroup: "DropGroup",
    LoseTicket: "LoseTicket",
    StopRun: "StopRun",
}
"""The kinds of their events: fixed strings, independent of the names of the classes."""


class JournalStore:
    """The storage of the writer thread: an open ``journal.db`` and the current shard.

    It has one method for each kind of record, which writes rows in an open transaction.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, object], *, rows_per_shard: int) -> None:
        """Open or create the tables; load the trajectories that are not in a shard yet."""
        self._db = sqlite3.connect(
            run_dir / FILE,
            timeout=LOCK_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(SCHEMA)
            self._write_meta(config)
            self._life = self._num_incarnations()
            self._shards = ShardWriter(
                run_dir / FOLDER, rows_per_shard=rows_per_shard, next_number=self._next_shard()
            )
            self._in_shard: list[int] = []
            self._take_up_blobs()
        except BaseException:
            self._db.close()
            raise

    # Transactions

    def begin(self) -> None:
        """Open a transaction."""
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit the transaction; write the shard after it if the shard is full."""
        self._db.execute("COMMIT")
        if self._shards.is_full:
            self._write_shard()

    def finish(self) -> None:
        """Write the current shard."""
        self._write_shard()

    def close(self) -> None:
        """Close the database; an open transaction is rolled back."""
        self._db.close()

    # Records

    def dispatched(self, time_s: float, ticket: Ticket, start_version: int) -> None:
        """Record that an attempt begins."""
        task = ticket.task
        self._db.execute(
            "INSERT INTO tickets"
            " (ticket_id, group_id, idx, task, state, attempt, start_version, life)"
            " VALUES (?, ?, ?, ?, 'running', ?, ?, ?) ON CONFLICT (ticket_id) DO UPDATE SET"
            " state = 'running', attempt = excluded.attempt, reason = '',"
            " start_version = excluded.start_version, life = excluded.life",
            (
                ticket.ticket_id,
                ticket.group_id,
                ticket.index,
                json.dumps([task.env_id, task.split, task.index, task.seed]),
                ticket.attempt,
                start_version,
                self._life,
            ),
        )
        self._ticket_event(time_s, "dispatched", ticket, start_version)

    def trajectory(self, time_s: float, trajectory: Trajectory) -> None:
        """Record that an attempt ended, successfully or not."""
        failed = trajectory.failure is not None
        # An aborted or expired ticket keeps its state if its episode ends late.
        self._db.execute(
            "UPDATE tickets SET state = ?"
            " WHERE ticket_id = ? AND attempt = ? AND state = 'running'",
            (
                "failed" if failed else "finished",
                trajectory.ticket.ticket_id,
                trajectory.ticket.attempt,
            ),
        )
        seq = self._insert_summary(time_s, trajectory)
        self._db.execute("INSERT INTO blobs VALUES (?, ?)", (seq, pack(trajectory)))
        self._add_to_shard(seq, trajectory)
        kind = "failed" if failed else "finished"
        self._ticket_event(time_s, kind, trajectory.ticket, trajectory.oldest_version)

    def decided(
        self, time_s: float, action: LoseTicket | AbortEpisode | DropGroup | StopRun
    ) -> None:
        """Record that the scheduler gave something up, or ended the run."""
        match action:
            case LoseTicket(ticket_id, reason):
                self._end_ticket(ticket_id, "lost", reason)
            case AbortEpisode(ticket_id, reason):
                self._end_ticket(ticket_id, "aborted", reason)
            case DropGroup(group_id, reason):
                self._db.execute(
                    "UPDATE tickets SET state = 'dropped', reason = ?"
                    " WHERE group_id = ? AND state IN ('queued', 'finished', 'failed')",
                    (reason, group_id),
                )
        fields = asdict(action)
        ticket_id = fields.pop("ticket_id", None)
        self.event(time_s, KINDS_OF_DECISIONS[type(action)], fields, ticket_id)

    def batch_taken(
        self,
        time_s: float,
        batch: int,
        group_ids: Sequence[str],
        staleness: Sequence[int],
        attempts: Mapping[str, int],
    ) -> None:
        """Record that the trainer begins a batch; ``attempts`` are by ticket id."""
        columns = (group_ids, staleness, list(attempts), list(attempts.values()))
        self._db.execute(
            "INSERT INTO batches"
            " (time_s, batch, state, group_ids, staleness, ticket_ids, attempts, life)"
            " VALUES (?, ?, 'taken', ?, ?, ?, ?, ?)",
            (time_s, batch, *map(json.dumps, columns), self._life),
        )
        self._db.executemany(
            "UPDATE tickets SET state = 'training', batch = ? WHERE ticket_id = ?",
            [(batch, t) for t in attempts],
        )

    def batch_trained(self, time_s: float, batch: int) -> None:
        """Record that a batch is trained and published."""
        self._db.execute(
            "UPDATE batches SET state = 'trained' WHERE batch = ? AND state = 'taken'", (batch,)
        )
        self._db.execute(
            "UPDATE tickets SET state = 'trained' WHERE batch = ? AND state = 'training'", (batch,)
        )
        self.event(time_s, "batch_trained", {}, policy_version=batch)

    def metrics(self, rows: Iterable[tuple[int, int, str, float]]) -> None:
        """Record (train_step, policy_version, name, value) rows; SQLite stores NaN as NULL."""
        self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, 0)", rows)

    def event(
        self,
        time_s: float,
        kind: str,
        payload: Mapping[str, object],
        ticket_id: object = None,
        attempt: int | None = None,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Record an event of a ticket, or of the run as a whole."""
        self._db.execute(
            "INSERT INTO events (time_s, kind, ticket_id, attempt, policy_version, payload)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (time_s, kind, ticket_id, attempt, policy_version, json.dumps(payload)),
        )

    def rolled_back(
        self,
        time_s: float,
        policy_version: int,
        reason: str,
        *,
        as_version: int | None = None,
        discards: tuple[int, int] | None = None,
    ) -> None:
        """Record that the run continues from a checkpoint; see :meth:`Journal.rolled_back`."""
        self._life += 1
        db, version = self._db, (policy_version,)
        # A checkpoint proves that the batches before it were trained.
        db.execute(
            "UPDATE batches SET state = 'trained' WHERE state = 'taken' AND batch < ?", version
        )
        db.execute(
            "UPDATE tickets SET state = 'trained' WHERE state = 'training' AND batch < ?", version
        )
        if discards is not None:
            self._discard(*discards, reason)
        self._queue_again(policy_version, f"back to version {policy_version}: {clean_text(reason)}")
        db.execute("UPDATE batches SET state = 'rolled_back' WHERE batch >= ?", version)
        # A validation measures the version itself, which is kept, and not the batch taken at it.
        db.execute(
            "UPDATE metrics SET rolled_back = 1 WHERE policy_version > ?"
            " OR (policy_version = ? AND name NOT LIKE 'validation/%')",
            version * 2,
        )
        payload: dict[str, object] = {"reason": clean_text(reason), "life": self._life}
        if as_version is not None and as_version != policy_version:
            payload["as_version"] = as_version
        self.event(time_s, ROLLED_BACK, payload, policy_version=policy_version)

    def _discard(self, start: int, stop: int, reason: str) -> None:
        """Discard the tickets trained in the batches from ``start`` to before ``stop``."""
        self._db.execute(
            "UPDATE tickets SET state = 'discarded_by_guard', rolled_back = rolled_back + 1,"
            " reason = ? WHERE state IN ('training', 'trained') AND batch >= ? AND batch < ?",
            (clean_text(reason), start, stop),
        )

    def _queue_again(self, policy_version: int, reason: str) -> None:
        """Queue all tickets of the groups that were open, rolled back, or dropped by a stop."""
        marks = ", ".join("?" * len(OPEN_STATES))
        groups = self._db.execute(
            "SELECT DISTINCT group_id FROM tickets"
            f" WHERE state IN ({marks}) OR reason = ? OR (state = 'trained' AND batch >= ?)",
            (*OPEN_STATES, STOPPED, policy_version),
        ).fetchall()
        self._db.executemany(
            "UPDATE tickets SET rolled_back = rolled_back + (batch IS NOT NULL), batch = NULL,"
            " state = 'queued', reason = ? WHERE group_id = ?",
            [(reason, group_id) for (group_id,) in groups],
        )

    # Helpers

    def _end_ticket(self, ticket_id: str, state: str, reason: str) -> None:
        # An expired ticket is aborted and then lost: the last state counts.
        self._db.execute(
            "UPDATE tickets SET state = ?, reason = ? WHERE ticket_id = ?",
            (state, clean_text(reason), ticket_id),
        )

    def _ticket_event(self, time_s: float, kind: str, ticket: Ticket, policy_version: int) -> None:
        whose = (ticket.ticket_id, ticket.attempt)
        self.event(time_s, kind, {}, *whose, policy_version=policy_version)

    def _insert_summary(self, time_s: float, trajectory: Trajectory) -> int:
        failure = trajectory.failure
        cursor = self._db.execute(
            "INSERT INTO trajectories (time_s, ticket_id, attempt, group_id, status, reward,"
            " score, success, num_tokens, num_loss_tokens, num_turns, oldest_version,"
            " start_version, wall_s, failure_kind, failure_boundary, failure_message, life)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                time_s,
                trajectory.ticket.ticket_id,
                trajectory.ticket.attempt,
                trajectory.ticket.group_id,
                trajectory.status,
                as_float(trajectory.reward),
                as_float(trajectory.score),
                as_bool(trajectory.success),
                trajectory.num_tokens,
                trajectory.num_loss_tokens,
                len(trajectory.turns),
                trajectory.oldest_version,
                trajectory.start_version,
                trajectory.wall_s,
                failure.kind.value if failure else None,
                failure.boundary if failure else None,
                clean_text(failure.message) if failure else None,
                self._life,
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _num_incarnations(self) -> int:
        query = "SELECT count(*) FROM events WHERE kind = ?"
        (n,) = self._db.execute(query, (ROLLED_BACK,)).fetchone()
        return int(n)

    def _write_meta(self, config: Mapping[str, object]) -> None:
        text = json.dumps(config, sort_keys=True, default=str)
        found = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if found is not None and int(found[0]) != SCHEMA_VERSION:
            raise ValueError(f"its schema is {found[0]}, this release writes {SCHEMA_VERSION}")
        rows = {
            "schema_version": str(SCHEMA_VERSION),
            "config": text,
            "config_hash": config_digest(text),
        }
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows.items())

    # Shards

    def _add_to_shard(self, seq: int, trajectory: Trajectory) -> None:
        self._shards.add(trajectory, trajectory_bytes(trajectory))
        self._in_shard.append(seq)

    def _write_shard(self) -> None:
        """Write the rows, then delete their blobs: a kill in between loses nothing."""
        name = self._shards.write()
        if name is None:
            return
        self.begin()
        self._db.executemany(
            "UPDATE trajectories SET shard = ?, shard_row = ? WHERE seq = ?",
            [(name, row, seq) for row, seq in enumerate(self._in_shard)],
        )
        self._db.executemany("DELETE FROM blobs WHERE seq = ?", [(s,) for s in self._in_shard])
        self._db.execute("COMMIT")
        self._in_shard = []

    def _next_shard(self) -> int:
        # A kill may leave a file above the last recorded one; its rows are still blobs.
        (last,) = self._db.execute("SELECT max(shard) FROM trajectories").fetchone()
        return int(last.removeprefix("part-").removesuffix(".parquet")) + 1 if last else 1

    def _take_up_blobs(self) -> None:
        for seq, blob in self._db.execute("SELECT seq, content FROM blobs ORDER BY seq"):
            self._add_to_shard(seq, unpack(blob))
