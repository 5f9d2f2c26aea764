"""Reads the journal of a run, also while it is being written.

Takes: a run directory. Gives: rows of its tables, and the trajectories themselves. Never: writes,
or locks the writer out.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from rollart_core.engine.events import ReturningGroup
from rollart_core.engine.shards import FOLDER, read_shard, unpack
from rollart_core.engine.tables import (
    FILE,
    ROLLED_BACK,
    SCHEMA_VERSION,
    AttemptRow,
    BatchRow,
    EventRow,
    MetricRow,
    OutcomeRow,
    TicketRow,
    TrajectoryRow,
)
from rollart_core.errors import JournalError, RollartError, first_line
from rollart_core.near import no_run
from rollart_core.types import Task, Trajectory

_Row = TypeVar("_Row", TicketRow, EventRow, MetricRow)
_NO_JOURNAL = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_NOTADB)
"""What SQLite answers of a file without our tables, and of one that is no database."""
_DAMAGE = (sqlite3.Error, ValueError, TypeError, LookupError, ArithmeticError, struct.error)
"""What reading raises of content that a run never writes."""
_SUCCESS = [f.name for f in fields(TrajectoryRow)].index("success")


class JournalReader:
    """A read-only view of ``journal.db``; use it in a ``with`` statement.

    Whatever the content of a damaged journal raises in the block becomes a JournalError.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open it.

        Raises:
            JournalError: When there is none, or it is none that this release can read.
        """
        self._run_dir = run_dir
        path = run_dir / FILE
        if not path.is_file():
            raise JournalError(no_run(run_dir, FILE))
        try:
            self._db = _open(path)
            self._check_schema()
        except sqlite3.Error as e:
            if getattr(e, "sqlite_errorcode", None) in _NO_JOURNAL:
                said = f"is no journal of a run, or one of another release ({e})"
                raise JournalError(f"{path} {said}") from e
            raise JournalError(f"{path} cannot be read: {e}") from e

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if isinstance(error, _DAMAGE) and not isinstance(error, RollartError):
            raise self._damaged(self._run_dir / FILE, error) from error

    def close(self) -> None:
        """Close it; may be called twice."""
        self._db.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See one moment of the journal for as long as the block lasts."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    def meta(self) -> dict[str, str]:
        """Return ``schema_version``, ``config`` (JSON) and ``config_hash``."""
        return dict(self._db.execute("SELECT key, value FROM meta"))

    def config(self) -> dict[str, object]:
        """Return the resolved run config."""
        return cast("dict[str, object]", json.loads(self.meta()["config"]))

    def tickets(self) -> list[TicketRow]:
        """Return all tickets, in the order dispatched."""
        return self._rows(TicketRow, "SELECT * FROM tickets ORDER BY rowid")

    def dropped_groups(self) -> dict[str, int]:
        """Return how many groups were dropped, by reason."""
        query = (
            "SELECT reason, count(DISTINCT group_id) FROM tickets"
            " WHERE state = 'dropped' GROUP BY reason ORDER BY reason"
        )
        return dict(self._db.execute(query))

    def batches(self) -> list[BatchRow]:
        """Return all batches, in the order taken; those rolled back too."""
        rows = self._db.execute("SELECT * FROM batches ORDER BY seq")
        return [BatchRow(*(_values(column) for column in row)) for row in rows]

    def events(
        self, *, kind: str | None = None, after_seq: int = 0, limit: int = -1
    ) -> list[EventRow]:
        """Return events after ``after_seq``, in order, at most ``limit`` (-1: all).

        Kinds are ``dispatched``, ``finished``, ``failed``, ``batch_trained``, ``rolled_back``, the
        names of the scheduler's deciding actions, and whatever :meth:`Journal.event` was told.
        """
        query = (
            "SELECT * FROM events WHERE seq > ? AND (? IS NULL OR kind = ?) ORDER BY seq LIMIT ?"
        )
        return self._rows(EventRow, query, after_seq, kind, kind, limit)

    def num_events(self, kind: str) -> int:
        """Return how many events of a kind there are."""
        (n,) = self._db.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone()
        return int(n)

    def validations(self) -> list[dict[str, Any]]:
        """Return the validations that stand, without those of versions that were undone."""
        found: dict[int, dict[str, Any]] = {}
        query = (
            "SELECT kind, policy_version, payload FROM events"
            " WHERE kind IN ('validation', ?) ORDER BY seq"
        )
        for kind, version, payload in self._db.execute(query, (ROLLED_BACK,)):
            if kind == ROLLED_BACK:
                found = {v: one for v, one in found.items() if v <= version}
            else:
                found[version] = json.loads(payload)
        return [found[version] for version in sorted(found)]

    def trajectory_rows(self, *, after_seq: int = 0, limit: int = -1) -> list[TrajectoryRow]:
        """Return the summaries of trajectories after ``after_seq``, in order."""
        query = "SELECT * FROM trajectories WHERE seq > ? ORDER BY seq LIMIT ?"
        return [_trajectory_row(r) for r in self._db.execute(query, (after_seq, limit))]

    def attempts(self) -> list[AttemptRow]:
        """Return, in order, the attempts of which something came back."""
        query = f"SELECT {', '.join(AttemptRow._fields)} FROM trajectories ORDER BY seq"
        return list(map(AttemptRow._make, self._db.execute(query)))

    def outcomes(self) -> list[OutcomeRow]:
        """Return, in order, when each attempt ran and what came of it."""
        query = f"SELECT {', '.join(OutcomeRow._fields)} FROM trajectories ORDER BY seq"
        return list(map(OutcomeRow._make, self._db.execute(query)))

    def metric_values(self) -> Iterator[tuple[str, int, float]]:
        """Yield name, policy_version and value of all metrics that count and are numbers."""
        query = "SELECT name, policy_version, value FROM metrics WHERE NOT rolled_back"
        return iter(self._db.execute(f"{query} AND value IS NOT NULL ORDER BY train_step, rowid"))

    def metrics(self, name: str | None = None, *, rolled_back: bool = False) -> list[MetricRow]:
        """Return all metrics, or those of one name, by train_step.

        Args:
            name: Which.
            rolled_back: Also those of train_steps that were undone.
        """
        query = (
            "SELECT * FROM metrics WHERE (? IS NULL OR name = ?) AND rolled_back <= ?"
            " ORDER BY train_step, rowid"
        )
        return self._rows(MetricRow, query, name, name, rolled_back)

    def last_train_step(self) -> int:
        """Return the largest number that the metrics of a train_step have; 0 without any."""
        (last,) = self._db.execute("SELECT max(train_step) FROM metrics").fetchone()
        return int(last or 0)

    def returning(self) -> list[ReturningGroup]:
        """Return the groups that wait to be done again, the oldest first."""
        query = (
            "SELECT group_id, task, idx, attempt FROM tickets WHERE state = 'queued'"
            " ORDER BY group_id, idx"
        )
        groups: dict[str, tuple[str, dict[int, int]]] = {}
        for group_id, task, index, attempt in self._db.execute(query):
            groups.setdefault(group_id, (task, {}))[1][index] = attempt + 1
        return [_returning(name, task, nexts) for name, (task, nexts) in groups.items()]

    def group_ids(self) -> set[str]:
        """Return the ids of all groups that were ever begun."""
        return {name for (name,) in self._db.execute("SELECT DISTINCT group_id FROM tickets")}

    def source_history(self) -> Iterator[tuple[str, Task, bool]]:
        """Yield what was done with the task source: group id, task, and whether it was put back.

        A group's first dispatch is the moment its task was taken.
        """
        query = (
            "SELECT t.group_id, t.task, e.kind = 'DropGroup' FROM events e JOIN tickets t ON"
            " t.ticket_id = CASE e.kind WHEN 'DropGroup'"
            " THEN json_extract(e.payload, '$.group_id') || '.0' ELSE e.ticket_id END"
            " WHERE (e.kind = 'dispatched' AND e.attempt = 0 AND t.idx = 0)"
            " OR (e.kind = 'DropGroup' AND json_extract(e.payload, '$.requeued'))"
            " ORDER BY e.seq"
        )
        for group_id, task, put_back in self._db.execute(query):
            yield group_id, Task(*json.loads(task)), bool(put_back)

    def newest_batch(self) -> int:
        """Return the last version at which a batch was ever taken; -1 when there was none."""
        (newest,) = self._db.execute("SELECT max(batch) FROM batches").fetchone()
        return -1 if newest is None else int(newest)

    def next_ordinal(self) -> int:
        """Return the number of the first group that was never dispatched."""
        (last,) = self._db.execute("SELECT max(group_id) FROM tickets").fetchone()
        return ordinal(last) + 1 if last else 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory once: those on shards, then those the journal still holds."""
        # One transaction is one view: what it does not find on a shard it finds as a blob.
        self._db.execute("BEGIN")
        blobs = self._db.execute("SELECT content FROM blobs ORDER BY seq").fetchall()
        query = "SELECT DISTINCT shard FROM trajectories WHERE shard IS NOT NULL ORDER BY shard"
        shards = [name for (name,) in self._db.execute(query)]
        self._db.execute("COMMIT")
        for name in shards:
            yield from self._shard(self._run_dir / FOLDER / name)
        for (blob,) in blobs:
            yield unpack(blob)

    def _shard(self, path: Path) -> list[Trajectory]:
        try:
            return read_shard(path)
        except (OSError, *_DAMAGE) as e:
            raise self._damaged(path, e) from e

    @staticmethod
    def _damaged(path: Path, error: BaseException) -> JournalError:
        why = first_line(f"{type(error).__name__}: {error}", limit=160)
        return JournalError(f"{path} is damaged, or lacks a part ({why}): restore it from a copy")

    def _check_schema(self) -> None:
        version = self.meta().get("schema_version", "0")
        if version != str(SCHEMA_VERSION):
            raise JournalError(
                f"{self._run_dir / FILE} has schema {version}; this release reads {SCHEMA_VERSION}"
            )

    def _rows(self, kind: type[_Row], query: str, *args: object) -> list[_Row]:
        return [kind(*r) for r in self._db.execute(query, args)]


def read_trajectories(run_dir: Path) -> Iterator[Trajectory]:
    """Yield every trajectory of a run, failed ones too.

    Raises:
        JournalError: When ``run_dir`` holds no journal.
    """
    with JournalReader(run_dir) as reader:
        yield from reader.trajectories()


def ordinal(group_id: str) -> int:
    """Return the number in a group's id."""
    return int(group_id.removeprefix("g"))


def _values(column: Any) -> Any:
    """Return a list kept as JSON as a tuple, and anything else as it is."""
    return tuple(json.loads(column)) if str(column).startswith("[") else column


def _returning(group_id: str, task: str, next_attempts: Mapping[int, int]) -> ReturningGroup:
    size = max(next_attempts) + 1
    attempts = tuple(next_attempts.get(i, 0) for i in range(size))
    return ReturningGroup(group_id, ordinal(group_id), Task(*json.loads(task)), attempts)


def _trajectory_row(columns: tuple[Any, ...]) -> TrajectoryRow:
    success = columns[_SUCCESS]
    if success is not None:
        columns = (*columns[:_SUCCESS], bool(success), *columns[_SUCCESS + 1 :])
    return TrajectoryRow(*columns)


def _open(path: Path) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=10.0, isolation_level=None)
    try:
        db.execute("SELECT 1 FROM meta").fetchone()
    except sqlite3.OperationalError:
        db.close()
        # A folder that cannot be written has no room for SQLite's shared memory; where no writer
        # left a log behind, the file alone is the whole truth.
        if path.with_name(f"{FILE}-wal").exists():
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return db
