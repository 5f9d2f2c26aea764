"""The journal's account of every ticket: trained once, retried, dropped or lost, and why.

Takes: a run directory. Gives: an :class:`AuditReport`. Never: trusts the scheduler's own counters;
staleness is worked out again from the recorded token versions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rollart_core.engine.journal_reader import JournalReader
from rollart_core.engine.tables import OPEN_STATES, BatchRow, TicketRow, TrajectoryRow


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Mean lengths of what finished against what was trained; equal when nothing is lost."""

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
    retried: int
    """Tickets with more than one attempt."""
    lost: Mapping[str, int]
    """Kind of the last failure -> tickets."""
    dropped: Mapping[str, int]
    """Reason -> tickets that finished, or waited for a retry, in a group that was not trained."""
    aborted: Mapping[str, int]
    """Reason -> tickets."""
    undone: int
    """Tickets given up by a resume; their tasks came again."""
    open: int
    """Tickets whose fate is not known: still running, or cut off by a kill."""
    failures: Mapping[str, int]
    """Kind -> attempts."""
    batches: int
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
        tickets = {t.ticket_id: t for t in reader.tickets()}
        batches = reader.batches()
        rows = reader.trajectory_rows()
        bound = staleness_bound(reader.config())
        ended = _end(reader)
    finished = {r.ticket_id: r for r in rows if r.failure_kind is None}
    live = [b for b in batches if b.state != "undone"]
    trained = [finished[t] for b in live for t in b.ticket_ids if t in finished]
    staleness = _staleness(batches, finished)
    return AuditReport(
        run_dir=str(run_dir),
        ended=ended,
        num_tickets=len(tickets),
        trained=sum(t.state == "trained" for t in tickets.values()),
        retried=sum(t.attempt > 0 for t in tickets.values()),
        lost=_lost(tickets.values()),
        dropped=_reasons(tickets.values(), "dropped"),
        aborted=_reasons(tickets.values(), "aborted"),
        undone=sum(t.state == "undone" for t in tickets.values()),
        open=sum(t.state in OPEN_STATES for t in tickets.values()),
        failures=dict(Counter(r.failure_kind for r in rows if r.failure_kind is not None)),
        batches=sum(b.state == "trained" for b in batches),
        staleness_bound=bound,
        max_staleness=max((s for _, s in staleness), default=None),
        staleness=dict(sorted(Counter(s for _, s in staleness).items())),
        length_bias=_length_bias(list(finished.values()), trained),
        violations=(
            *_too_stale(staleness, bound),
            *_wrongly_trained(live, tickets, finished),
            *_unaccounted(tickets.values(), live, ended is not None),
        ),
    )


def staleness_bound(config: Mapping[str, object]) -> int:
    """Return the bound a resolved run config promises, in versions."""
    if config.get("mode") == "sync":
        return 0
    return int(str(config.get("max_staleness", 1)))


def _end(reader: JournalReader) -> str | None:
    """Return the reason of the last end that no resume followed."""
    resumes = [e.seq for e in reader.events(kind="resumed")]
    stops = reader.events(kind="StopRun", after_seq=max(resumes, default=0))
    return str(json.loads(stops[-1].payload)["reason"]) if stops else None


def _staleness(
    batches: Iterable[BatchRow], finished: Mapping[str, TrajectoryRow]
) -> list[tuple[str, int]]:
    """Return ticket and staleness of all that was ever trained on."""
    return [
        (t, b.batch - finished[t].oldest_version)
        for b in batches
        for t in b.ticket_ids
        if t in finished
    ]


def _too_stale(staleness: Iterable[tuple[str, int]], bound: int) -> list[str]:
    return [f"{t} was trained at staleness {s}, above {bound}" for t, s in staleness if s > bound]


def _wrongly_trained(
    live: Sequence[BatchRow],
    tickets: Mapping[str, TicketRow],
    finished: Mapping[str, TrajectoryRow],
) -> list[str]:
    times = Counter(t for b in live for t in b.ticket_ids)
    problems = [f"{t} was trained {n} times" for t, n in times.items() if n > 1]
    for ticket_id in times:
        ticket = tickets.get(ticket_id)
        if ticket is None:
            problems.append(f"{ticket_id} was trained and never dispatched")
        elif ticket.state not in ("training", "trained"):
            problems.append(f"{ticket_id} was trained and is also {ticket.state}: {ticket.reason}")
        if ticket_id not in finished:
            problems.append(f"{ticket_id} was trained and has no finished trajectory")
    return problems


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


def _lost(tickets: Iterable[TicketRow]) -> dict[str, int]:
    # A reason reads "kind: message", and messages may be as many as tickets.
    kinds = Counter(t.reason.partition(":")[0] for t in tickets if t.state == "lost")
    return dict(kinds.most_common())


def _reasons(tickets: Iterable[TicketRow], state: str) -> dict[str, int]:
    return dict(Counter(t.reason for t in tickets if t.state == state).most_common())


def _length_bias(finished: Sequence[TrajectoryRow], trained: Sequence[TrajectoryRow]) -> LengthBias:
    return LengthBias(
        finished_tokens_mean=_mean([r.num_tokens for r in finished]),
        finished_turns_mean=_mean([r.num_turns for r in finished]),
        trained_tokens_mean=_mean([r.num_tokens for r in trained]),
        trained_turns_mean=_mean([r.num_turns for r in trained]),
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
