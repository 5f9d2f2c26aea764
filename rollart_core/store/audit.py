"""The journal's account of every ticket: trained once, retried, rolled back, dropped, or lost; why.

Takes: a run directory. Gives: an :class:`AuditReport`. Never: trusts the scheduler's own counters;
staleness and lineage are worked out again from the recorded versions and attempts.
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
from rollart_core.types import FailureKind

Attempt = tuple[str, int]
"""Ticket id and attempt."""


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Mean lengths of what was dispatched, of what finished, and of what was trained.

    All equal when nothing is lost. Of a ticket that was cut off (aborted, failed) the longest
    attempt counts, as far as it came: the dispatched means are lower bounds then.
    """

    dispatched_tokens_mean: float
    dispatched_turns_mean: float
    finished_tokens_mean: float
    finished_turns_mean: float
    trained_tokens_mean: float
    trained_turns_mean: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What became of a run's tickets."""

    run_dir: str
    ended: str | None
    """Why the run ended; None when it did not, or was killed."""
    num_tickets: int
    trained: int
    """In the lineage of the newest weights."""
    retried: int
    """Tickets of which an attempt failed and another followed."""
    rolled_back: int
    """Tickets that were trained in a batch that was undone; by now they may be trained again."""
    lost: Mapping[str, int]
    """Kind of the last failure -> tickets."""
    dropped: Mapping[str, int]
    """Reason -> tickets that finished, or waited for a retry, in a group that was not trained."""
    discarded_by_guard: int
    """Tickets that were trained in a batch that the guard undid; they are not trained again."""
    aborted: Mapping[str, int]
    """Reason -> tickets; ``redundant``: enough of its siblings had finished."""
    open: int
    """Tickets whose fate is not known yet: the run is going on, or was cut off."""
    attempts: int
    """Dispatched."""
    unrecorded: int
    """Attempts of which nothing came back: still running, or cut off by a kill."""
    failures: Mapping[str, int]
    """Kind -> attempts."""
    batches: int
    batches_rolled_back: int
    guard: tuple[str, ...]
    """Each trip of the guard: when, and why."""
    went_back: tuple[str, ...]
    """Each time the run went back to a checkpoint: to which version, and why."""
    staleness_bound: int
    max_staleness: int | None
    """Largest found in any batch; None without one."""
    staleness: Mapping[int, int]
    """Versions -> trained trajectories."""
    length_bias: LengthBias
    violations: tuple[str, ...] = field(default=())
    """Broken promises, one sentence each; none in a sound run."""

    @property
    def ok(self) -> bool:
        """True when no promise was broken."""
        return not self.violations

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        staleness = {str(k): v for k, v in self.staleness.items()}
        return {"ok": self.ok, **asdict(self), "staleness": staleness}


def audit(run_dir: Path) -> AuditReport:
    """Account for every ticket of a run, ended or not.

    Raises:
        JournalError: When ``run_dir`` holds no journal.
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
    """Return the bound a resolved run config promises, in versions."""
    if config.get("mode") == "sync":
        return 0
    return int(str(config.get("max_staleness", 1)))


def _incarnations(reader: JournalReader) -> tuple[tuple[str, ...], str | None]:
    """Return each going back, and the reason of the last end that nothing followed."""
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
    """Return ticket and staleness of all that was ever trained on."""
    return [
        (member[0], b.batch - finished[member].oldest_version)
        for b in batches
        for member in _members([b])
        if member in finished
    ]


def _too_stale(staleness: Iterable[tuple[str, int]], bound: int) -> list[str]:
    return [f"{t} was trained at staleness {s}, above {bound}" for t, s in staleness if s > bound]


def _skipped(reader: JournalReader) -> set[int]:
    """Return the versions that no batch of the newest weights has: the guard went past them."""
    found: set[int] = set()
    for event in reader.events(kind=ROLLED_BACK):
        first = event.policy_version or 0
        found -= {version for version in found if version >= first}
        with reader.decoding():
            found |= set(range(first, json.loads(event.payload).get("as_version", first)))
    return found


def _wrong_batches(live: Sequence[BatchRow], skipped: Container[int]) -> list[str]:
    """Every version comes of one batch, and none is left out but those the guard went past."""
    times = Counter(b.batch for b in live)
    found = [f"batch {b} was trained {n} times" for b, n in sorted(times.items()) if n > 1]
    found += [f"batch {b} was trained, and is undone" for b in times if b in skipped]
    wanted = (b for b in range(max(times, default=0)) if b not in skipped)
    return found + [f"batch {b} is missing" for b in wanted if b not in times]


def _wrongly_discarded(tickets: Iterable[TicketRow], trips: Sequence[Rollback]) -> list[str]:
    """Only what was trained since the checkpoint of a trip is discarded."""
    return [
        f"{t.ticket_id} is discarded_by_guard, and was in no batch that the guard undid"
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
            problems.append(f"{ticket_id} was trained and never dispatched")
        elif ticket.state not in ("training", "trained"):
            problems.append(f"{ticket_id} was trained and is also {ticket.state}: {ticket.reason}")
        if (ticket_id, attempt) not in finished:
            problems.append(f"{ticket_id} was trained and has no finished trajectory")
    return problems


def _out_of_lineage(live: Sequence[BatchRow], finished: Mapping[Attempt, AttemptRow]) -> list[str]:
    """What weights of a lost life generated may not be trained in a later one."""
    return [
        f"{member[0]} was trained on what versions generated that had been undone"
        for b in live
        for member in _members([b])
        if member in finished and finished[member].life != b.life
    ]


def _never_dispatched(rows: Iterable[AttemptRow], tickets: Container[str]) -> list[str]:
    unknown = dict.fromkeys(r.ticket_id for r in rows if r.ticket_id not in tickets)
    return [f"{t} has a trajectory and was never dispatched" for t in unknown]


def _unaccounted(
    tickets: Iterable[TicketRow], live: Sequence[BatchRow], has_ended: bool
) -> list[str]:
    in_batch = {t for b in live for t in b.ticket_ids}
    problems = [
        f"{t.ticket_id} counts as trained and is in no batch"
        for t in tickets
        if t.state == "trained" and t.ticket_id not in in_batch
    ]
    if has_ended:
        problems += [
            f"{t.ticket_id} is unaccounted for: the run has ended and it is still {t.state}"
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
    return [f"{len(missing)} groups were begun and are not in the journal: {which}"]


def _lost(tickets: Iterable[TicketRow]) -> dict[str, int]:
    # A reason reads "kind: message", and messages may be as many as tickets.
    kinds = Counter(t.reason.partition(":")[0] for t in tickets if t.state == "lost")
    return dict(kinds.most_common())


def _reasons(tickets: Iterable[TicketRow], state: str) -> dict[str, int]:
    return dict(Counter(t.reason for t in tickets if t.state == state).most_common())


def _length_bias(rows: Sequence[AttemptRow], trained: Sequence[AttemptRow]) -> LengthBias:
    finished = [r for r in rows if r.failure_kind is None]
    longest: dict[str, AttemptRow] = {}
    for row in rows:
        if row.ticket_id not in longest or row.num_tokens > longest[row.ticket_id].num_tokens:
            longest[row.ticket_id] = row
    dispatched = list(longest.values())
    return LengthBias(
        dispatched_tokens_mean=_mean([r.num_tokens for r in dispatched]),
        dispatched_turns_mean=_mean([r.num_turns for r in dispatched]),
        finished_tokens_mean=_mean([r.num_tokens for r in finished]),
        finished_turns_mean=_mean([r.num_turns for r in finished]),
        trained_tokens_mean=_mean([r.num_tokens for r in trained]),
        trained_turns_mean=_mean([r.num_turns for r in trained]),
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
