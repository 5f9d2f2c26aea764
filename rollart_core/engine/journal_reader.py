"""Reads the journal of a run, also while it is being written.

Takes: a run directory. Gives: rows of its tables, and the trajectories themselves. Never: writes,
or locks the writer out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from rollart_core.engine.shards import FOLDER, read_shard, unpack
from rollart_core.engine.tables import (
    FILE,
    SCHEMA_VERSION,
    BatchRow,
    EventRow,
    MetricRow,
    TicketRow,
    TrajectoryRow,
)
from rollart_core.errors import JournalError
from rollart_core.types import Trajectory

_Row = TypeVar("_Row", TicketRow, EventRow, MetricRow)


class JournalReader:
    """A read-only view of ``journal.db``; use it in a ``with`` statement."""

    def __init__(self, run_dir: Path) -> None:
        """Open it.

        Raises:
            JournalError: When there is none, or it is none that this release can read.
        """
        self._run_dir = run_dir
        path = run_dir / FILE
        if not path.is_file():
            raise JournalError(f"{run_dir} is no run directory: it has no {FILE}")
        try:
            self._db = _open(path)
            self._check_schema()
        except sqlite3.Error as e:
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

    def close(self) -> None:
        """Close it; may be called twice."""
        self._db.close()

    def meta(self) -> dict[str, str]:
        """Return ``schema_version``, ``config`` (JSON) and ``config_hash``."""
        return dict(self._db.execute("SELECT key, value FROM meta"))

    def config(self) -> dict[str, object]:
        """Return the resolved run config."""
        return cast("dict[str, object]", json.loads(self.meta()["config"]))

    def tickets(self) -> list[TicketRow]:
        """Return all tickets, in the order dispatched."""
        return self._rows(TicketRow, "SELECT * FROM tickets ORDER BY rowid")

    def batches(self) -> list[BatchRow]:
        """Return all batches, in the order taken; undone ones too."""
        rows = self._db.execute("SELECT * FROM batches ORDER BY seq")
        return [BatchRow(*r[:4], *(tuple(json.loads(x)) for x in r[4:])) for r in rows]

    def events(
        self, *, kind: str | None = None, after_seq: int = 0, limit: int = -1
    ) -> list[EventRow]:
        """Return events after ``after_seq``, in order, at most ``limit`` (-1: all).

        Kinds are ``dispatched``, ``finished``, ``failed``, ``batch_trained``, ``resumed``, the
        names of the scheduler's deciding actions, and whatever :meth:`Journal.event` was told.
        """
        query = (
            "SELECT * FROM events WHERE seq > ? AND (? IS NULL OR kind = ?) ORDER BY seq LIMIT ?"
        )
        return self._rows(EventRow, query, after_seq, kind, kind, limit)

    def trajectory_rows(self, *, after_seq: int = 0, limit: int = -1) -> list[TrajectoryRow]:
        """Return the summaries of trajectories after ``after_seq``, in order."""
        query = "SELECT * FROM trajectories WHERE seq > ? ORDER BY seq LIMIT ?"
        return [_trajectory_row(r) for r in self._db.execute(query, (after_seq, limit))]

    def metrics(self, name: str | None = None) -> list[MetricRow]:
        """Return all metrics, or those of one name, by train_step."""
        query = "SELECT * FROM metrics WHERE ? IS NULL OR name = ? ORDER BY train_step, rowid"
        return self._rows(MetricRow, query, name, name)

    def next_ordinal(self) -> int:
        """Return the number of the first group that was never dispatched."""
        (last,) = self._db.execute("SELECT max(group_id) FROM tickets").fetchone()
        return int(last.removeprefix("g")) + 1 if last else 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory once: those on shards, then those the journal still holds."""
        # One transaction is one view: what it does not find on a shard it finds as a blob.
        self._db.execute("BEGIN")
        blobs = self._db.execute("SELECT content FROM blobs ORDER BY seq").fetchall()
        query = "SELECT DISTINCT shard FROM trajectories WHERE shard IS NOT NULL ORDER BY shard"
        shards = [name for (name,) in self._db.execute(query)]
        self._db.execute("COMMIT")
        for name in shards:
            yield from read_shard(self._run_dir / FOLDER / name)
        for (blob,) in blobs:
            yield unpack(blob)

    def _check_schema(self) -> None:
        version = int(self.meta().get("schema_version", "0"))
        if version != SCHEMA_VERSION:
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


def _trajectory_row(columns: tuple[Any, ...]) -> TrajectoryRow:
    row = TrajectoryRow(*columns)
    return row if row.success is None else replace(row, success=bool(row.success))


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
