"""The events, the actions and the policy of the scheduler, as frozen records.

Takes: nothing. Gives: the records between the controller and the pure scheduler. Never: contains
behaviour; that is in :mod:`rollart_core.scheduling.scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollart_core.types import Failure, FailureKind, Task, Ticket

DropReason = Literal["too_small", "filtered", "equal", "too_stale", "stopped"]
"""Why a whole group is not trained. ``equal``: all its rewards are equal. ``stopped``: the run
ended first."""

StopKind = Literal["done", "requested", "preempted", "failures", "guard"]
"""``failures``: too many episodes failed. ``guard``: the guard tripped too often."""

REDUNDANT = "redundant"
"""The reason of the abort of a member when enough of its siblings have finished."""


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """The limits of a schedule; see ``Rollout``, ``AsyncRun``, ``Failures`` of the config."""

    groups_per_batch: int
    group_size: int
    max_concurrent: int
    redundant: int = 0
    """Extra members that a group begins with beyond ``group_size``; the slowest are aborted."""
    mode: Literal["sync", "async"] = "async"
    min_group_size: int = 1
    requeues_small: bool = False
    """Whether the task of a group that is too small is put back, instead of the next task."""
    max_equal_groups: int | None = None
    """The run ends after this number of consecutive groups dropped as ``equal``."""
    max_staleness: int = 1
    """In versions; 0 with ``mode="sync"``."""
    on_stale: Literal["wait", "drop"] = "wait"
    max_retries: int = 2
    max_failure_rate: float = 1.0
    """The run stops if more than this share of the last ``failure_window`` attempts failed."""
    failure_window: int = 64
    num_batches: int | None = None
    """Trainer version at which the run is done. If None, it runs until a stop is requested."""
    scored_together: frozenset[str] = frozenset()
    """Environments whose reward scores a whole group together."""

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
            raise ValueError(f"a schedule needs sizes above 0 and bounds of at least 0: {self}")
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is above group_size {self.group_size}; "
                "no group would ever be large enough"
            )

    @property
    def num_members(self) -> int:
        """The number of members that a group begins with."""
        return self.group_size + self.redundant

    @property
    def staleness_bound(self) -> int:
        """The maximum staleness of a trained group, in versions."""
        return 0 if self.mode == "sync" else self.max_staleness

    @property
    def drops_stale(self) -> bool:
        """True when the trainer does not wait for groups that would become too stale."""
        return self.mode == "async" and self.on_stale == "drop"


@dataclass(frozen=True, slots=True)
class ReturningGroup:
    """A group of an earlier incarnation, open or rolled back, that runs again unchanged."""

    group_id: str
    ordinal: int
    task: Task
    attempts: tuple[int, ...] = ()
    """The next attempt of each member, by index; 0 for members that are not in it."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Engines and trainer are up and both hold ``policy_version``."""

    policy_version: int = 0
    next_ordinal: int = 0
    """Number of the first group; above all numbers that earlier incarnations used."""
    returning: tuple[ReturningGroup, ...] = ()
    """Groups that run before any new group, in this order."""


@dataclass(frozen=True, slots=True)
class EpisodePlayed:
    """An episode has ended and only waits for its score; its slot is free."""

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
    """The filter hook kept a complete group; a batch may take it from now on."""

    group_id: str


@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """A complete group is not trained, because of the filter hook or of its equal rewards."""

    group_id: str
    reason: Literal["filtered", "equal"] = "filtered"


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """All engines hold ``policy_version``."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The trainer is idle again and has published ``policy_version``."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The end of the run is requested: by Ctrl-C, the wall clock or the guard."""

    reason: str
    kind: StopKind = "requested"


@dataclass(frozen=True, slots=True)
class PlacesLent:
    """A validation uses this number of the ``max_concurrent`` slots; training has the others."""

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
    """Run this attempt of the ticket in a new environment."""

    ticket: Ticket
    start_version: int


@dataclass(frozen=True, slots=True)
class AbortEpisode:
    """End a running episode; its late events are ignored, and its slot is free immediately."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoseTicket:
    """The ticket has failed permanently: it will never be trained."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """Score the remaining members together; all of them have ended and wait for their score."""

    group_id: str
    ticket_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """All members are settled and enough finished; reply with ``GroupKept`` or ``GroupFiltered``.

    The controller builds the Group and calls the filter hook. No batch takes it before the reply.
    """

    group_id: str
    lost: tuple[int, ...] = ()
    """Indices of the members that failed permanently or were not needed."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Train on these groups; the trainer holds ``policy_version``. Reply with ``BatchTrained``."""

    group_ids: tuple[str, ...]
    policy_version: int


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Delete a group. Its running episodes are already aborted; finished ones are not trained."""

    group_id: str
    reason: DropReason
    requeued: bool = False
    """True if its task was put back and will run again as a new group."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run is over; no action follows."""

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
    """The state of a schedule. Gauges are current values, counters cover the whole run."""

    policy_version: int
    """Version of the trainer."""
    num_running: int
    """Episodes that hold a slot."""
    num_open_groups: int
    """Groups that run or wait for the result of the filter."""
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
    """Tickets that were not needed; if dispatched, they also count as aborted."""
    trained: int
    """Tickets."""
    dropped: Mapping[DropReason, int]
    """Groups."""
    requeued: int
    """Tasks."""
    returned: int
    """Groups of an earlier incarnation of the run that were admitted again."""
    batches: int
    num_scoring: int = 0
    """Episodes that only wait for their score."""
