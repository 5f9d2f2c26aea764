"""The reader of a run's journal, which also works while the journal is written.

Takes: a run directory. Gives: rows of its tables, and the trajectories. Never: writes, or blocks
the writer.
"""

from __future__ import annotations

import functools
import json
import sqlite3
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from rollart_core.errors import JournalError, RollartError, first_line
from rollart_core.scheduling.events import ReturningGroup
from rollart_core.store.journal_schema import (
    FILE,
    ROLLED_BACK,
    SCHEMA_VERSION,
    STARTED,
    AttemptRow,
    BatchRow,
    EventRow,
    MetricRow,
    OutcomeRow,
    TicketRow,
    config_digest,
)
from rollart_core.store.trajectory_files import FOLDER, read_shard, unpack
from rollart_core.suggestions import no_run
from rollart_core.types import Task, Trajectory

_Row = TypeVar("_Row", TicketRow, EventRow, MetricRow, AttemptRow, OutcomeRow)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_NO_JOURNAL = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_NOTADB)
"""SQLite's error codes for a file without our tables, and for a file that is not a database."""
_DAMAGE = (sqlite3.Error, ValueError, TypeError, LookupError, ArithmeticError, struct.error)
"""The exceptions that damaged content raises."""
_STORED: Mapping[object, tuple[type, ...]] = {bool: (int,), float: (float, int), tuple: (str,)}
"""The types in which SQLite returns values of other types."""


def _reads(
    method: Callable[Concatenate[JournalReader, _Args], _Result],
) -> Callable[Concatenate[JournalReader, _Args], _Result]:
    """Convert exceptions of a reader's method about damaged content to JournalError."""

    @functools.wraps(method)
    def guarded(self: JournalReader, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self.decoding():
            return method(self, *args, **kwargs)

    return guarded


class JournalReader:
    """A read-only view of ``journal.db``; use it in a ``with`` statement.

    Every method raises JournalError if the content is damaged, that is, if it cannot be read or a
    value has a type that a run never writes. Other exceptions of the ``with`` block are unchanged.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open the journal.

        Raises:
            JournalError: If there is none, or this release cannot read it.
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
                said = f"is not the journal of a run, or is from another release ({e})"
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

    def close(self) -> None:
        """Close the journal; may be called twice."""
        self._db.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read one consistent state of the journal within the block."""
        with self.decoding():
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            with self.decoding():
                self._db.execute("COMMIT")

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Convert exceptions about damaged content in the block to JournalError.

        Use it to decode records of other modules, such as the payloads of events. The block should
        contain nothing else.
        """
        try:
            yield
        except _DAMAGE as e:
            if isinstance(e, RollartError):
                raise
            raise self._damaged(self._run_dir / FILE, e) from e

    @_reads
    def meta(self) -> dict[str, str]:
        """Return ``schema_version``, ``config`` (JSON) and ``config_hash``."""
        return dict(_typed((str, str), self._db.execute("SELECT key, value FROM meta")))

    @_reads
    def config(self) -> dict[str, object]:
        """Return the resolved run config."""
        meta = self.meta()
        if meta["config_hash"] != config_digest(meta["config"]):
            raise ValueError("the config does not match its hash")
        return cast("dict[str, object]", json.loads(meta["config"]))

    @_reads
    def tickets(self) -> list[TicketRow]:
        """Return all tickets, in the order of dispatch."""
        rows = self._rows(TicketRow, "SELECT * FROM tickets ORDER BY rowid")
        for row in rows:
            ordinal(row.group_id)
        return rows

    @_reads
    def dropped_groups(self) -> dict[str, int]:
        """Return the number of dropped groups by reason."""
        query = (
            "SELECT reason, count(DISTINCT group_id) FROM tickets"
            " WHERE state = 'dropped' GROUP BY reason ORDER BY reason"
        )
        return dict(_typed((str, int), self._db.execute(query)))

    @_reads
    def batches(self) -> list[BatchRow]:
        """Return all batches in the order taken, including the rolled back ones."""
        rows = self._db.execute("SELECT * FROM batches ORDER BY seq")
        return [_batch_row(row) for row in _typed(_stored(BatchRow), rows)]

    @_reads
    def events(self, *, kind: str | None = None, after_seq: int = 0) -> list[EventRow]:
        """Return events after ``after_seq``, in order.

        The kinds are ``dispatched``, ``finished``, ``failed``, ``batch_trained``, ``rolled_back``,
        the names of the scheduler's decisions, and the kinds passed to :meth:`Journal.event`.
        """
        query = "SELECT * FROM events WHERE seq > ? AND (? IS NULL OR kind = ?) ORDER BY seq"
        return self._rows(EventRow, query, after_seq, kind, kind)

    @_reads
    def num_events(self, kind: str) -> int:
        """Return the number of events of a kind."""
        (n,) = self._db.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone()
        return int(n)

    @_reads
    def validations(self) -> list[dict[str, Any]]:
        """Return the validations, without those of rolled back versions."""
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

    @_reads
    def spent_s(self, kind: str) -> float:
        """Return the seconds from each event of a kind to the last event of the same process."""
        query = (
            "SELECT total((SELECT time_s FROM events WHERE seq < coalesce((SELECT min(seq)"
            " FROM events WHERE kind = ? AND seq > began.seq), 1 << 62)"
            " ORDER BY seq DESC LIMIT 1) - time_s) FROM events began WHERE kind = ?"
        )
        (seconds,) = self._db.execute(query, (STARTED, kind)).fetchone()
        return float(seconds)

    @_reads
    def attempt_sums(self) -> list[tuple[Any, ...]]:
        """Return sums over the recorded attempts, by environment and kind of failure.

        The columns are environment, kind, number of attempts, and the sums of success, score,
        reward, tokens, generated tokens and turns.
        """
        columns = ("success", "score", "reward", "num_tokens", "num_loss_tokens", "num_turns")
        query = (
            "SELECT json_extract(task, '$[0]'), failure_kind, count(*),"
            f" {', '.join(f'total({column})' for column in columns)}"
            " FROM trajectories JOIN tickets USING (ticket_id) GROUP BY 1, 2"
        )
        kinds: list[Any] = [str, (str, NoneType), int, *(float for _ in columns)]
        return list(_typed(kinds, self._db.execute(query)))

    @_reads
    def attempts(self) -> list[AttemptRow]:
        """Return the recorded attempts, in order."""
        query = f"SELECT {', '.join(AttemptRow._fields)} FROM trajectories ORDER BY seq"
        return self._rows(AttemptRow, query)

    @_reads
    def outcomes(self) -> list[OutcomeRow]:
        """Return the time and the outcome of each recorded attempt, in order."""
        query = f"SELECT {', '.join(OutcomeRow._fields)} FROM trajectories ORDER BY seq"
        return self._rows(OutcomeRow, query)

    def metric_values(self) -> Iterator[tuple[str, int, float]]:
        """Yield name, policy_version and value of all numeric metrics that are not rolled back."""
        query = "SELECT name, policy_version, value FROM metrics WHERE NOT rolled_back"
        with self.decoding():
            query = f"{query} AND value IS NOT NULL ORDER BY train_step, rowid"
            yield from _typed((str, int, float), self._db.execute(query))

    @_reads
    def metrics(self, name: str | None = None, *, rolled_back: bool = False) -> list[MetricRow]:
        """Return all metrics, or those of one name, by train_step.

        Args:
            name: The name of the metric. If None, all metrics are returned.
            rolled_back: Whether to include metrics of rolled back train_steps.
        """
        query = (
            "SELECT * FROM metrics WHERE (? IS NULL OR name = ?) AND rolled_back <= ?"
            " ORDER BY train_step, rowid"
        )
        return self._rows(MetricRow, query, name, name, rolled_back)

    @_reads
    def last_train_step(self) -> int:
        """Return the largest train_step of all metrics; 0 if there are none."""
        (last,) = self._db.execute("SELECT max(train_step) FROM metrics").fetchone()
        return int(last or 0)

    @_reads
    def returning(self) -> list[ReturningGroup]:
        """Return the groups that are queued to run again, oldest first."""
        query = (
            "SELECT group_id, task, idx, attempt FROM tickets WHERE state = 'queued'"
            " ORDER BY group_id, idx"
        )
        groups: dict[str, tuple[str, dict[int, int]]] = {}
        for group_id, task, index, attempt in self._db.execute(query):
            groups.setdefault(group_id, (task, {}))[1][index] = attempt + 1
        return [_returning(name, task, nexts) for name, (task, nexts) in groups.items()]

    @_reads
    def group_ids(self) -> set[str]:
        """Return the ids of all groups that were ever started."""
        return {name for (name,) in self._db.execute("SELECT DISTINCT group_id FROM tickets")}

    def source_history(self) -> Iterator[tuple[str, Task, bool]]:
        """Yield the uses of the task source: group id, task, and whether the task was put back.

        The first dispatch of a group is the time when its task was drawn.
        """
        query = (
            "SELECT t.group_id, t.task, e.kind = 'DropGroup' FROM events e JOIN tickets t ON"
            " t.ticket_id = CASE e.kind WHEN 'DropGroup'"
            " THEN json_extract(e.payload, '$.group_id') || '.0' ELSE e.ticket_id END"
            " WHERE (e.kind = 'dispatched' AND e.attempt = 0 AND t.idx = 0)"
            " OR (e.kind = 'DropGroup' AND json_extract(e.payload, '$.requeued'))"
            " ORDER BY e.seq"
        )
        with self.decoding():
            for group_id, task, put_back in self._db.execute(query):
                ordinal(group_id)
                yield group_id, Task(*json.loads(task)), bool(put_back)

    @_reads
    def newest_batch(self) -> int:
        """Return the last version at which a batch was taken; -1 if there was none."""
        (newest,) = self._db.execute("SELECT max(batch) FROM batches").fetchone()
        return -1 if newest is None else int(newest)

    @_reads
    def next_ordinal(self) -> int:
        """Return the number of the first group that was never dispatched."""
        (last,) = self._db.execute("SELECT max(group_id) FROM tickets").fetchone()
        return ordinal(last) + 1 if last else 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory once: first those in shards, then those still in the journal."""
        query = "SELECT DISTINCT shard FROM trajectories WHERE shard IS NOT NULL ORDER BY shard"
        # In one transaction, every trajectory is either in a shard or in a blob.
        with self.snapshot(), self.decoding():
            blobs = self._db.execute("SELECT content FROM blobs ORDER BY seq").fetchall()
            shards = [name for (name,) in _typed((str,), self._db.execute(query))]
        for name in shards:
            yield from self._shard(self._run_dir / FOLDER / name)
        for (blob,) in blobs:
            with self.decoding():
                trajectory = unpack(blob)
            yield trajectory

    def _shard(self, path: Path) -> list[Trajectory]:
        try:
            return read_shard(path)
        except (OSError, *_DAMAGE) as e:
            raise self._damaged(path, e) from e

    @staticmethod
    def _damaged(path: Path, error: BaseException) -> JournalError:
        why = first_line(f"{type(error).__name__}: {error}", limit=160)
        return JournalError(f"{path} is damaged or incomplete ({why}): restore it from a copy")

    def _check_schema(self) -> None:
        version = dict(self._db.execute("SELECT key, value FROM meta")).get("schema_version", "0")
        if version != str(SCHEMA_VERSION):
            raise JournalError(
                f"{self._run_dir / FILE} has schema {version}; this release reads {SCHEMA_VERSION}"
            )

    def _rows(self, kind: type[_Row], query: str, *args: object) -> list[_Row]:
        return [kind(*row) for row in _typed(_stored(kind), self._db.execute(query, args))]


def read_trajectories(run_dir: Path) -> Iterator[Trajectory]:
    """Yield every trajectory of a run, including failed ones.

    Raises:
        JournalError: If ``run_dir`` contains no journal.
    """
    with JournalReader(run_dir) as reader:
        yield from reader.trajectories()


def ordinal(group_id: str) -> int:
    """Return the number in a group's id."""
    return int(group_id.removeprefix("g"))


def _stored(row: type) -> tuple[tuple[type, ...], ...]:
    """Return the types that SQLite returns for each column of a row."""
    hints = get_type_hints(row)
    names = [f.name for f in fields(row)] if is_dataclass(row) else list(hints)
    return tuple(_stored_as(hints[name]) for name in names)


def _stored_as(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _stored_as(part))
    plain = str if get_origin(hint) is Literal else get_origin(hint) or hint
    return _STORED.get(plain, (plain,))


def _typed(
    kinds: Collection[type | tuple[type, ...]], rows: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Yield rows, and check the types of their columns.

    Raises:
        TypeError: If a row has other types.
    """
    known: set[tuple[type, ...]] = set()
    for row in rows:
        found = tuple(map(type, row))
        if found not in known:  # the rows of a table have few combinations of types
            if not all(map(isinstance, row, kinds)):
                raise TypeError(f"unexpected types {', '.join(kind.__name__ for kind in found)}")
            known.add(found)
        yield row


def _batch_row(columns: tuple[Any, ...]) -> BatchRow:
    """Return a batch; its lists are stored as JSON."""
    values: list[Any] = [tuple(json.loads(c)) if str(c).startswith("[") else c for c in columns]
    row = BatchRow(*values)
    lists = {"group_ids": str, "staleness": int, "ticket_ids": str, "attempts": int}
    for name, kind in lists.items():
        value = getattr(row, name)
        if not isinstance(value, tuple) or not all(isinstance(one, kind) for one in value):
            raise TypeError(f"{name} of a batch is not a list of {kind.__name__}")
    if len(row.ticket_ids) != len(row.attempts):
        raise ValueError("the numbers of tickets and attempts of a batch differ")
    return row


def _returning(group_id: str, task: str, next_attempts: Mapping[int, int]) -> ReturningGroup:
    size = max(next_attempts) + 1
    attempts = tuple(next_attempts.get(i, 0) for i in range(size))
    return ReturningGroup(group_id, ordinal(group_id), Task(*json.loads(task)), attempts)


def _open(path: Path) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=10.0, isolation_level=None)
    try:
        db.execute("SELECT 1 FROM meta").fetchone()
    except sqlite3.OperationalError:
        db.close()
        # SQLite cannot create its shared memory file in a read-only folder. If there is no
        # write-ahead log, the database file is complete and can be opened as immutable.
        if path.with_name(f"{FILE}-wal").exists():
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return db
