"""The tables of the journal: their SQL schema, and frozen records for their rows.

Takes: nothing. Gives: the schema and one record per table. Never: opens a database.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

SCHEMA_VERSION = 2
FILE = "journal.db"

TicketState = Literal[
    "queued",
    "running",
    "finished",
    "failed",
    "training",
    "trained",
    "lost",
    "aborted",
    "dropped",
    "discarded_by_guard",
]
"""``queued`` waits to run again after the run went back to an earlier version. ``failed`` waits for
its retry, ``finished`` for its group. ``discarded_by_guard`` was trained in a batch that the guard
rolled back, and is not trained again."""

OPEN_STATES: tuple[TicketState, ...] = ("queued", "running", "finished", "failed", "training")
"""The states that no ticket may have after the end of the run."""

BatchState = Literal["taken", "trained", "rolled_back"]

STOPPED = "stopped"
"""The reason of tickets that were dropped because the run was stopped; a resumed run runs them
again."""
ROLLED_BACK = "rolled_back"
"""Kind of the event that begins a new incarnation of the run, from an earlier version."""
STARTED, TRAINING = "process_started", "training_began"
"""Kinds of the events at which a process starts or resumes the run, and begins its RL phase."""
BATCH_TOTALS = "batch_totals"
"""Kind of the event with the contribution of a batch to the report."""
EVALUATED = "evaluated"
"""Kind of the event with the evaluation before training."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tickets (
    ticket_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, idx INTEGER NOT NULL,
    task TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    start_version INTEGER NOT NULL, batch INTEGER, reason TEXT NOT NULL DEFAULT '',
    life INTEGER NOT NULL, rolled_back INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS tickets_by_group ON tickets (group_id);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, ticket_id TEXT,
    attempt INTEGER, policy_version INTEGER, payload TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY, time_s REAL NOT NULL, batch INTEGER NOT NULL, state TEXT NOT NULL,
    group_ids TEXT NOT NULL, staleness TEXT NOT NULL, ticket_ids TEXT NOT NULL,
    attempts TEXT NOT NULL, life INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS trajectories (
    seq INTEGER PRIMARY KEY, time_s REAL NOT NULL, ticket_id TEXT NOT NULL,
    attempt INTEGER NOT NULL, group_id TEXT NOT NULL, status TEXT NOT NULL,
    reward REAL, score REAL, success INTEGER, num_tokens INTEGER NOT NULL,
    num_loss_tokens INTEGER NOT NULL, num_turns INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, start_version INTEGER NOT NULL, wall_s REAL NOT NULL,
    failure_kind TEXT, failure_boundary TEXT, failure_message TEXT,
    shard TEXT, shard_row INTEGER, life INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS trajectories_by_ticket ON trajectories (ticket_id, attempt);
CREATE TABLE IF NOT EXISTS blobs (seq INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (
    train_step INTEGER NOT NULL, policy_version INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    rolled_back INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, train_step);
"""


def config_digest(config: str) -> str:
    """Return the ``config_hash`` of the table ``meta`` for a config's JSON."""
    return blake2b(config.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class TicketRow:
    """The current state of one ticket."""

    ticket_id: str
    group_id: str
    idx: int
    task: str
    """JSON of ``[env_id, split, index, seed]``."""
    state: TicketState
    attempt: int
    """The last dispatched attempt."""
    start_version: int
    batch: int | None
    """Number of the batch that took it."""
    reason: str
    """Why it is lost, aborted, dropped or queued."""
    life: int
    """Incarnation of the run at its last dispatch: the number of rollbacks until then."""
    rolled_back: int
    """Number of rolled back batches that contained it."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event."""

    seq: int
    time_s: float
    """Seconds since 1970."""
    kind: str
    ticket_id: str | None
    attempt: int | None
    policy_version: int | None
    payload: str
    """JSON object."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch that the trainer took."""

    seq: int
    time_s: float
    batch: int
    """The trainer's policy_version when it took the batch."""
    state: BatchState
    group_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    """Staleness of each group, in versions."""
    ticket_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    """The trained attempt of each ticket."""
    life: int


class AttemptRow(NamedTuple):
    """The columns of a trajectory that an audit needs; a run may have very many."""

    ticket_id: str
    attempt: int
    failure_kind: str | None
    oldest_version: int
    num_tokens: int
    num_turns: int
    life: int


class OutcomeRow(NamedTuple):
    """The time and the outcome of an attempt; a run may have very many."""

    time_s: float
    """When it ended, in seconds since 1970."""
    wall_s: float
    reward: float | None
    success: int | None
    failure_kind: str | None


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of one train_step."""

    train_step: int
    """Number of the report, from 1, in the order of writing. Skipped updates count too, and numbers
    are never reused. In older journals, two batches may share a number."""
    policy_version: int
    name: str
    value: float | None
    """None if it was not a number."""
    rolled_back: bool
    """True if the train_step was rolled back; its replacements have other numbers."""
