"""What the journal's writer thread does to its database: one method a kind of record.

Takes: records, and the time each was handed in. Gives: rows in an open transaction. Never: runs
in two threads at once, or decides when to commit; :mod:`rollart_core.store.journal` does.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rollart_core.scheduling.events import AbortEpisode, DropGroup, LoseTicket, StopRun
from rollart_core.store.shards import (
    FOLDER,
    ShardWriter,
    as_bool,
    as_float,
    clean_text,
    pack,
    trajectory_bytes,
    unpack,
)
from rollart_core.store.tables import (
    FILE,
    OPEN_STATES,
    ROLLED_BACK,
    SCHEMA,
    SCHEMA_VERSION,
    STOPPED,
    config_digest,
)
from rollart_core.types import Ticket, Trajectory

LOCK_TIMEOUT_S = 10.0


KINDS_OF_DECISIONS: Final[Mapping[type, str]] = {
    AbortEpisode: "AbortEpisode",
    DropGroup: "DropGroup",
    LoseTicket: "LoseTicket",
    StopRun: "StopRun",
}
"""The kinds of their events: fixed strings, since journals outlive names of classes."""


class JournalStore:
    """An open ``journal.db`` and the shard that is filling."""

    def __init__(self, run_dir: Path, config: Mapping[str, object], *, rows_per_shard: int) -> None:
        """Open or make the tables; take up trajectories that no shard holds yet."""
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
        """Close it; a shard that is full is written after."""
        self._db.execute("COMMIT")
        if self._shards.is_full:
            self._write_shard()

    def finish(self) -> None:
        """Write the shard that is filling."""
        self._write_shard()

    def close(self) -> None:
        """Close the database, and give up a transaction that is still open."""
        self._db.close()

    # Records

    def dispatched(self, time_s: float, ticket: Ticket, start_version: int) -> None:
        """An attempt begins."""
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
        self._event(time_s, "dispatched", ticket, start_version)

    def trajectory(self, time_s: float, trajectory: Trajectory) -> None:
        """An attempt ended, well or not."""
        failed = trajectory.failure is not None
        # An aborted or expired ticket stays what it is when its episode still says something.
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
        self._event(time_s, kind, trajectory.ticket, trajectory.oldest_version)

    def decided(
        self, time_s: float, action: LoseTicket | AbortEpisode | DropGroup | StopRun
    ) -> None:
        """The scheduler gave something up, or ended the run."""
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
        self._insert_event(
            time_s, KINDS_OF_DECISIONS[type(action)], fields.pop("ticket_id", None), fields
        )

    def batch_taken(
        self,
        time_s: float,
        batch: int,
        group_ids: Sequence[str],
        staleness: Sequence[int],
        attempts: Mapping[str, int],
    ) -> None:
        """The trainer begins a batch of these attempts, by ticket id."""
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
        """A batch is trained and published."""
        self._db.execute(
            "UPDATE batches SET state = 'trained' WHERE batch = ? AND state = 'taken'", (batch,)
        )
        self._db.execute(
            "UPDATE tickets SET state = 'trained' WHERE batch = ? AND state = 'training'", (batch,)
        )
        self.event(time_s, "batch_trained", {}, policy_version=batch)

    def metrics(self, rows: Iterable[tuple[int, int, str, float]]) -> None:
        """Keep (train_step, policy_version, name, value) rows; SQLite stores NaN as NULL."""
        self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, 0)", rows)

    def event(
        self,
        time_s: float,
        kind: str,
        payload: Mapping[str, object],
        *,
        policy_version: int | None = None,
    ) -> None:
        """Keep an event of the run as a whole."""
        self._insert_event(time_s, kind, None, payload, policy_version=policy_version)

    def rolled_back(
        self,
        time_s: float,
        policy_version: int,
        reason: str,
        *,
        as_version: int | None = None,
        discards: tuple[int, int] | None = None,
    ) -> None:
        """The run goes on from the checkpoint of ``policy_version``; see :meth:`Journal`."""
        self._life += 1
        db, version = self._db, (policy_version,)
        # A checkpoint is proof that the batches before it were trained.
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
        # A validation measures the version itself, which stands, and not the batch taken at it.
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
        """Leave out what was trained in the batches from ``start`` to before ``stop``."""
        self._db.execute(
            "UPDATE tickets SET state = 'discarded_by_guard', rolled_back = rolled_back + 1,"
            " reason = ? WHERE state IN ('training', 'trained') AND batch >= ? AND batch < ?",
            (clean_text(reason), start, stop),
        )

    def _queue_again(self, policy_version: int, reason: str) -> None:
        """Queue all tickets of the groups that were open, undone, or given up by a stop."""
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

    # Parts of the above

    def _end_ticket(self, ticket_id: str, state: str, reason: str) -> None:
        # An expired ticket is aborted and then lost: the last word counts.
        self._db.execute(
            "UPDATE tickets SET state = ?, reason = ? WHERE ticket_id = ?",
            (state, clean_text(reason), ticket_id),
        )

    def _event(self, time_s: float, kind: str, ticket: Ticket, policy_version: int) -> None:
        self._db.execute(
            "INSERT INTO events (time_s, kind, ticket_id, attempt, policy_version, payload)"
            " VALUES (?, ?, ?, ?, ?, '{}')",
            (time_s, kind, ticket.ticket_id, ticket.attempt, policy_version),
        )

    def _insert_event(
        self,
        time_s: float,
        kind: str,
        ticket_id: object,
        payload: Mapping[str, object],
        *,
        policy_version: int | None = None,
    ) -> None:
        self._db.execute(
            "INSERT INTO events (time_s, kind, ticket_id, policy_version, payload)"
            " VALUES (?, ?, ?, ?, ?)",
            (time_s, kind, ticket_id, policy_version, json.dumps(payload)),
        )

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
            raise ValueError(f"its schema is {found[0]}, this release speaks {SCHEMA_VERSION}")
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
        """Write the rows, and only then delete their blobs: a kill in between loses nothing."""
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
        # A file above the last one the journal knows was left by a kill; its rows are still blobs.
        (last,) = self._db.execute("SELECT max(shard) FROM trajectories").fetchone()
        return int(last.removeprefix("part-").removesuffix(".parquet")) + 1 if last else 1

    def _take_up_blobs(self) -> None:
        for seq, blob in self._db.execute("SELECT seq, content FROM blobs ORDER BY seq"):
            self._add_to_shard(seq, unpack(blob))
