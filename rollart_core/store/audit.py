"""The audit of a run: the state of every ticket according to the journal, and the reason.

Takes: a run directory. Gives: an :class:`AuditReport`. Never: trusts the scheduler's own counters;
staleness and lineage are computed again from the recorded versions and attempts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rollart_core.scheduling.run_guard import GUARD_TRIPPED, Rollback
from rollart_core.store.journal_reader import JournalReader, ordinal
from rollart_core.store.journal_schema import (
    OPEN_STATES,
    ROLLED_BACK,
    AttemptRow,
    BatchRow,
    TicketRow,
)
from rollart_core.store.metrics import Lengths
from rollart_core.types import FailureKind

Attempt = tuple[str, int]
"""Ticket id and attempt."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: the states of a run's tickets."""

    run_dir: str
    ended: str | None
    """Why the run ended; None if it did not end, or was killed."""
    num_tickets: int
    trained: int
    """Tickets in the lineage of the newest weights."""
    retried: int
    """Tickets with a failed attempt and another one after it."""
    rolled_back: int
    """Tickets that were trained in a batch that was rolled back; they may be trained again."""
    lost: Mapping[str, int]
    """Kind of the last failure -> tickets."""
    dropped: Mapping[str, int]
    """Reason -> tickets that finished, or waited for a retry, in a group that was not trained."""
    discarded_by_guard: int
    """Tickets trained in a batch that the guard rolled back; they are not trained again."""
    aborted: Mapping[str, int]
    """Reason -> tickets; ``redundant``: enough of its siblings had finished."""
    open: int
    """Tickets without a final state: the run is in progress, or was killed."""
    attempts: int
    """Dispatched attempts."""
    attempts_aborted: int
    """Recorded attempts that were cancelled; the tickets may have ended otherwise."""
    outcomes: Mapping[str, int]
    """Outcome -> attempts; their sum is ``attempts``. ``trained`` includes batches in training,
    ``not trained`` those whose group was dropped, or waits."""
    unrecorded: int
    """Attempts without a trajectory: still running, or ended by a kill."""
    failures: Mapping[str, int]
    """Kind -> attempts."""
    batches: int
    batches_rolled_back: int
    guard: tuple[str, ...]
    """Each trip of the guard: its version and reason."""
    went_back: tuple[str, ...]
    """Each return of the run to a checkpoint: its version and reason."""
    staleness_bound: int
    max_staleness: int | None
    """The largest staleness in any batch; None if there is no batch."""
    staleness: Mapping[int, int]
    """Versions -> trained trajectories."""
    length_bias: Mapping[str, float]
    """Mean lengths of the dispatched, the finished and the trained tickets.

    They are equal if no ticket is lost. For a ticket that was aborted or failed, the recorded
    length of its longest attempt counts, so the dispatched means are lower bounds.
    """
    violations: tuple[str, ...] = field(default=())
    """Violated guarantees, one sentence each; empty in a correct run."""

    @property
    def ok(self) -> bool:
        """True if no guarantee is violated."""
        return not self.violations

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain JSON."""
        staleness = {str(k): v for k, v in self.staleness.items()}
        return {"ok": self.ok, **asdict(self), "staleness": staleness}


def audit(run_dir: Path) -> AuditReport:
    """Audit every ticket of a run, ended or not.

    Raises:
        JournalError: If ``run_dir`` contains no journal.
    """
    with JournalReader(run_dir) as reader:
        return _audited(run_dir, reader)


def _audited(run_dir: Path, reader: JournalReader) -> AuditReport:
    with reader.snapshot():
        tickets = {t.ticket_id: t for t in reader.tickets()}
        batches = reader.batches()
        rows = reader.attempts()
        bound = staleness_bound(reader.config())
        num_attempts = reader.num_events("dispatched")
        went_back, ended = _incarnations(reader)
        tripped = reader.events(kind=GUARD_TRIPPED)
        with reader.decoding():
            trips = [Rollback(**json.loads(e.payload)) for e in tripped]
        skipped = _skipped(reader)
    finished = {(r.ticket_id, r.attempt): r for r in rows if r.failure_kind is None}
    live = [b for b in batches if b.state != "rolled_back"]
    staleness = _staleness(batches, finished)
    failed = [r for r in rows if r.failure_kind not in (None, FailureKind.CANCELLED)]
    return AuditReport(
        run_dir=str(run_dir),
        ended=ended,
        num_tickets=len(tickets),
        trained=sum(t.state == "trained" for t in tickets.values()),
        retried=len(
            {
                r.ticket_id
                for r in failed
                if r.ticket_id in tickets and r.attempt < tickets[r.ticket_id].attempt
            }
        ),
        rolled_back=sum(t.rolled_back > 0 for t in tickets.values()),
        lost=_lost(tickets.values()),
        dropped=_reasons(tickets.values(), "dropped"),
        discarded_by_guard=sum(t.state == "discarded_by_guard" for t in tickets.values()),
        aborted=_reasons(tickets.values(), "aborted"),
        open=sum(t.state in OPEN_STATES for t in tickets.values()),
        attempts=num_attempts,
        attempts_aborted=sum(r.failure_kind == FailureKind.CANCELLED for r in rows),
        outcomes=_outcomes(num_attempts, rows, batches),
        unrecorded=num_attempts - len(rows),
        failures=dict(Counter(str(r.failure_kind) for r in failed)),
        batches=sum(b.state == "trained" for b in batches),
        batches_rolled_back=sum(b.state == "rolled_back" for b in batches),
        guard=tuple(f"at version {t.policy_version}: {t.reason}" for t in trips),
        went_back=went_back,
        staleness_bound=bound,
        max_staleness=max((s for _, s in staleness), default=None),
        staleness=dict(sorted(Counter(s for _, s in staleness).items())),
        length_bias=_length_bias(rows, [finished[a] for a in _members(live) if a in finished]),
        violations=(
            *_too_stale(staleness, bound),
            *_wrong_batches(live, skipped),
            *_wrongly_trained(live, tickets, finished),
            *_out_of_lineage(live, finished),
            *_never_dispatched(rows, tickets),
            *_unaccounted(tickets.values(), live, ended is not None),
            *_missing_groups(tickets.values()),
            *_wrongly_discarded(tickets.values(), trips),
        ),
    )


def staleness_bound(config: Mapping[str, object]) -> int:
    """Return the staleness bound of a resolved run config, in versions."""
    if config.get("mode") == "sync":
        return 0
    return int(str(config.get("max_staleness", 1)))


def _incarnations(reader: JournalReader) -> tuple[tuple[str, ...], str | None]:
    """Return each rollback, and the reason of the end of the run; None if it continued."""
    back = reader.events(kind=ROLLED_BACK)
    stops = reader.events(kind="StopRun", after_seq=max((e.seq for e in back), default=0))
    with reader.decoding():
        ended = str(json.loads(stops[-1].payload)["reason"]) if stops else None
        reasons = [str(json.loads(e.payload)["reason"]) for e in back]
    versions = [e.policy_version for e in back]
    pairs = zip(versions, reasons, strict=True)
    return tuple(f"to version {v}: {why}" for v, why in pairs), ended


def _members(batches: Iterable[BatchRow]) -> Iterator[Attempt]:
    for batch in batches:
        yield from zip(batch.ticket_ids, batch.attempts, strict=True)


def _staleness(
    batches: Iterable[BatchRow], finished: Mapping[Attempt, AttemptRow]
) -> list[tuple[str, int]]:
    """Return ticket and staleness of every trained trajectory."""
    return [
        (member[0], b.batch - finished[member].oldest_version)
        for b in batches
        for member in _members([b])
        if member in finished
    ]


def _outcomes(
    num_attempts: int, rows: Sequence[AttemptRow], batches: Sequence[BatchRow]
) -> dict[str, int]:
    kinds = Counter(row.failure_kind for row in rows)
    finished = {(row.ticket_id, row.attempt) for row in rows if row.failure_kind is None}
    trained = finished.intersection(_members(b for b in batches if b.state != "rolled_back"))
    undone = finished.intersection(_members(batches)) - trained
    cancelled = kinds[FailureKind.CANCELLED]
    return {
        "trained": len(trained),
        "rolled back": len(undone),
        "not trained": kinds[None] - len(trained) - len(undone),
        "failed": len(rows) - kinds[None] - cancelled,
        "cancelled": cancelled,
        "unrecorded": num_attempts - len(rows),
    }


def _too_stale(staleness: Iterable[tuple[str, int]], bound: int) -> list[str]:
    return [f"{t} was trained at staleness {s}, above {bound}" for t, s in staleness if s > bound]


def _skipped(reader: JournalReader) -> set[int]:
    """Return the versions without a batch of the newest weights: the guard skipped them."""
    found: set[int] = set()
    for event in reader.events(kind=ROLLED_BACK):
        first = event.policy_version or 0
        found -= {version for version in found if version >= first}
        with reader.decoding():
            found |= set(range(first, json.loads(event.payload).get("as_version", first)))
    return found


def _wrong_batches(live: Sequence[BatchRow], skipped: Container[int]) -> list[str]:
    """Check that every version has exactly one batch, except those that the guard skipped."""
    times = Counter(b.batch for b in live)
    found = [f"batch {b} was trained {n} times" for b, n in sorted(times.items()) if n > 1]
    found += [f"batch {b} was trained, but is rolled back" for b in times if b in skipped]
    wanted = (b for b in range(max(times, default=0)) if b not in skipped)
    return found + [f"batch {b} is missing" for b in wanted if b not in times]


def _wrongly_discarded(tickets: Iterable[TicketRow], trips: Sequence[Rollback]) -> list[str]:
    """Check that only tickets trained since the checkpoint of a trip are discarded."""
    return [
        f"{t.ticket_id} is discarded_by_guard, but was in no batch that the guard rolled back"
        for t in tickets
        if t.state == "discarded_by_guard"
        and not any(trip.back_to <= (t.batch or 0) < trip.as_version for trip in trips)
    ]


def _wrongly_trained(
    live: Sequence[BatchRow],
    tickets: Mapping[str, TicketRow],
    finished: Mapping[Attempt, AttemptRow],
) -> list[str]:
    times = Counter(t for b in live for t in b.ticket_ids)
    problems = [f"{t} was trained {n} times" for t, n in times.items() if n > 1]
    for ticket_id, attempt in dict.fromkeys(_members(live)):
        ticket = tickets.get(ticket_id)
        if ticket is None:
            problems.append(f"{ticket_id} was trained but never dispatched")
        elif ticket.state not in ("training", "trained"):
            problems.append(f"{ticket_id} was trained but is also {ticket.state}: {ticket.reason}")
        if (ticket_id, attempt) not in finished:
            problems.append(f"{ticket_id} was trained but has no finished trajectory")
    return problems


def _out_of_lineage(live: Sequence[BatchRow], finished: Mapping[Attempt, AttemptRow]) -> list[str]:
    """Check that no incarnation trains on trajectories of an earlier one."""
    return [
        f"{member[0]} was trained on a trajectory of versions that were rolled back before"
        for b in live
        for member in _members([b])
        if member in finished and finished[member].life != b.life
    ]


def _never_dispatched(rows: Iterable[AttemptRow], tickets: Container[str]) -> list[str]:
    unknown = dict.fromkeys(r.ticket_id for r in rows if r.ticket_id not in tickets)
    return [f"{t} has a trajectory but was never dispatched" for t in unknown]


def _unaccounted(
    tickets: Iterable[TicketRow], live: Sequence[BatchRow], has_ended: bool
) -> list[str]:
    in_batch = {t for b in live for t in b.ticket_ids}
    problems = [
        f"{t.ticket_id} counts as trained but is in no batch"
        for t in tickets
        if t.state == "trained" and t.ticket_id not in in_batch
    ]
    if has_ended:
        problems += [
            f"{t.ticket_id} has no final state: the run has ended, but it is still {t.state}"
            for t in tickets
            if t.state in OPEN_STATES
        ]
    return problems


def _missing_groups(tickets: Iterable[TicketRow]) -> list[str]:
    known = {ordinal(t.group_id) for t in tickets}
    missing = [i for i in range(max(known, default=-1) + 1) if i not in known]
    if not missing:
        return []
    which = ", ".join(f"g{i:07d}" for i in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return [f"{len(missing)} groups were started but are not in the journal: {which}"]


def _lost(tickets: Iterable[TicketRow]) -> dict[str, int]:
    # A reason has the form "kind: message", and every ticket may have a different message.
    kinds = Counter(t.reason.partition(":")[0] for t in tickets if t.state == "lost")
    return dict(kinds.most_common())


def _reasons(tickets: Iterable[TicketRow], state: str) -> dict[str, int]:
    return dict(Counter(t.reason for t in tickets if t.state == state).most_common())


def _length_bias(rows: Sequence[AttemptRow], trained: Sequence[AttemptRow]) -> dict[str, float]:
    finished = [r for r in rows if r.failure_kind is None]
    longest: dict[str, AttemptRow] = {}
    for row in rows:
        if row.ticket_id not in longest or row.num_tokens > longest[row.ticket_id].num_tokens:
            longest[row.ticket_id] = row
    named = {"dispatched": longest.values(), "finished": finished, "trained": trained}
    found: dict[str, float] = {}
    for name, some in named.items():
        tokens, turns = sum(r.num_tokens for r in some), sum(r.num_turns for r in some)
        found |= Lengths(len(some), tokens, turns).means(name)
    return found
