"""What the scheduler is told and what it answers: frozen events, actions and its policy.

Takes: nothing. Gives: the records between the controller and the pure scheduler. Never: holds
behaviour; :mod:`rollart_core.scheduling.scheduler` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollart_core.types import Failure, FailureKind, Task, Ticket

DropReason = Literal["too_small", "filtered", "equal", "too_stale", "stopped"]
"""Why a whole group is not trained; ``equal``: all its rewards are; ``stopped``: the run ended
before it could be."""

StopKind = Literal["done", "requested", "failures", "guard"]
"""``failures``: too many episodes failed; ``guard``: training went wrong too often."""

REDUNDANT = "redundant"
"""Why a member is aborted when enough of its siblings have finished."""


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """The numbers a schedule obeys; see ``Rollout``, ``AsyncRun``, ``Failures`` of the config."""

    groups_per_batch: int
    group_size: int
    max_concurrent: int
    redundant: int = 0
    """Members a group begins with beyond ``group_size``; the last to finish are aborted."""
    mode: Literal["sync", "async"] = "async"
    min_group_size: int = 1
    requeues_small: bool = False
    """Whether the task of a group that is too small comes again, instead of the next one."""
    max_equal_groups: int | None = None
    """So many groups in a row that are dropped for being ``equal`` end the run."""
    max_staleness: int = 1
    """In versions; ``mode="sync"`` reads it as 0."""
    on_stale: Literal["wait", "drop"] = "wait"
    max_retries: int = 2
    max_failure_rate: float = 1.0
    """Share of failed attempts among the last ``failure_window``; above it the run stops."""
    failure_window: int = 64
    num_batches: int | None = None
    """Trainer version at which the run is done; None: until told to stop."""
    scored_together: frozenset[str] = frozenset()
    """Environments whose reward sees a whole group."""

    def __post_init__(self) -> None:
        at_least_one = (
            self.groups_per_batch,
            self.group_size,
            self.max_concurrent,
            self.min_group_size,
            self.failure_window,
        )
        not_negative = (self.max_staleness, self.max_retries, self.redundant)
        if min(at_least_one) < 1 or min(not_negative) < 0:
            raise ValueError(f"a schedule needs positive sizes and bounds of 0 or more: {self}")
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is above group_size {self.group_size}; "
                "no group would ever be large enough"
            )

    @property
    def num_members(self) -> int:
        """Members that a group begins with."""
        return self.group_size + self.redundant

    @property
    def staleness_bound(self) -> int:
        """Largest staleness a trained group may have, in versions."""
        return 0 if self.mode == "sync" else self.max_staleness

    @property
    def drops_stale(self) -> bool:
        """True when the trainer does not wait for groups that would become too stale."""
        return self.mode == "async" and self.on_stale == "drop"


@dataclass(frozen=True, slots=True)
class ReturningGroup:
    """A group of an earlier life of the run, open or rolled back: it comes again as itself."""

    group_id: str
    ordinal: int
    task: Task
    attempts: tuple[int, ...] = ()
    """By index: the next attempt of each member; 0 for those that are not in it."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Engines and trainer are up and both hold ``policy_version``."""

    policy_version: int = 0
    next_ordinal: int = 0
    """Number of the first group; above all numbers an earlier part of the run gave out."""
    returning: tuple[ReturningGroup, ...] = ()
    """Groups that come before any new one, in this order."""


@dataclass(frozen=True, slots=True)
class EpisodePlayed:
    """An episode has come to its end and only waits for its score: its place is free."""

    ticket_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class EpisodeFinished:
    """An episode ended with a reward (finished or truncated)."""

    ticket_id: str
    attempt: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """An episode ended without a reward."""

    ticket_id: str
    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TicketExpired:
    """The deadline over all attempts of a ticket passed."""

    ticket_id: str


@dataclass(frozen=True, slots=True)
class GroupKept:
    """The filter hook kept a complete group; only now may a batch take it."""

    group_id: str


@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """A complete group is not to be trained: the filter hook says so, or its rewards do."""

    group_id: str
    reason: Literal["filtered", "equal"] = "filtered"


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """All engines hold ``policy_version`` now."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The trainer is idle again and has published ``policy_version``."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end: Ctrl-C, the wall clock, the guard."""

    reason: str
    kind: StopKind = "requested"


@dataclass(frozen=True, slots=True)
class PlacesLent:
    """So many places of ``max_concurrent`` are not for training: a validation has them."""

    num_places: int


Event: TypeAlias = (
    RunStarted
    | EpisodePlayed
    | EpisodeFinished
    | EpisodeFailed
    | TicketExpired
    | GroupKept
    | GroupFiltered
    | WeightsLoaded
    | BatchTrained
    | StopRequested
    | PlacesLent
)


@dataclass(frozen=True, slots=True)
class StartEpisode:
    """Run this attempt of the ticket on a fresh environment."""

    ticket: Ticket
    start_version: int


@dataclass(frozen=True, slots=True)
class AbortEpisode:
    """End a running episode; nothing it still says will be heard, and its place is free at once."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoseTicket:
    """The ticket has failed for good: it will never be trained."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """All members that are left have played and wait: score them together."""

    group_id: str
    ticket_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """All members are settled and enough finished; answer with ``GroupKept`` or ``GroupFiltered``.

    The controller builds the Group and asks the filter hook; until it answers, no batch takes it.
    """

    group_id: str
    lost: tuple[int, ...] = ()
    """Indices of the members that failed for good, or were not needed."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Train on these groups; the trainer holds ``policy_version``. Answer with ``BatchTrained``."""

    group_ids: tuple[str, ...]
    policy_version: int


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Forget a group. Its running episodes were aborted just before; the finished are untrained."""

    group_id: str
    reason: DropReason
    requeued: bool = False
    """True when its task was put back and will come again as a fresh group."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run is over; nothing follows."""

    reason: str
    kind: StopKind


Action: TypeAlias = (
    StartEpisode
    | AbortEpisode
    | LoseTicket
    | ScoreGroup
    | CompleteGroup
    | TrainBatch
    | DropGroup
    | StopRun
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a schedule stands. Gauges speak of now, counters of the whole run."""

    policy_version: int
    """Of the trainer."""
    num_running: int
    """Episodes that hold a place."""
    num_open_groups: int
    """Running, or waiting for the filter's verdict."""
    num_ready_groups: int
    dispatched: int
    """Attempts."""
    finished: int
    """Attempts."""
    failed: Mapping[FailureKind, int]
    """Attempts."""
    retried: int
    """Attempts."""
    lost: int
    """Tickets."""
    aborted: int
    """Tickets."""
    redundant: int
    """Tickets that were not needed; the dispatched ones of them count as aborted too."""
    trained: int
    """Tickets."""
    dropped: Mapping[DropReason, int]
    """Groups."""
    requeued: int
    """Tasks."""
    returned: int
    """Groups of an earlier life that were admitted again."""
    batches: int
    num_scoring: int = 0
    """Episodes that only wait for their score."""
