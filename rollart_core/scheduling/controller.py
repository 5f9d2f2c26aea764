"""The loop of a run: it passes events to the scheduler and executes the returned actions.

    action                the controller                            event for the scheduler
    StartEpisode     ->   runs the episode as a task           ->   EpisodePlayed, which frees its
                                                                    slot while it is scored, and
                                                                    EpisodeFinished | EpisodeFailed
    AbortEpisode     ->   cancels that task
    ScoreGroup       ->   starts the scoring of the group
    CompleteGroup    ->   builds the group, calls the filter   ->   GroupKept | GroupFiltered
    TrainBatch       ->   trains, publishes, checkpoints,      ->   BatchTrained
                          validates if that is due,            ->   PlacesLent
                          and swaps the engines meanwhile      ->   WeightsLoaded
    DropGroup        ->   deletes the group's trajectories
    StopRun          ->   cancels the remaining tasks and returns

Takes: the components of a run. Gives: the reason why it ended. Never: decides what is run, retried,
trained or dropped (the scheduler decides that); depends on where a component executes (the runtime
decides that); or blocks on one episode while another one needs attention.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.weights import Publication
from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done
from rollart_core.scheduling.buffer import Buffer
from rollart_core.scheduling.curriculum import CurriculumTasks
from rollart_core.scheduling.events import (
    AbortEpisode,
    Action,
    BatchTrained,
    CompleteGroup,
    DropGroup,
    EpisodeFailed,
    EpisodeFinished,
    EpisodePlayed,
    Event,
    GroupFiltered,
    GroupKept,
    LoseTicket,
    PlacesLent,
    RunStarted,
    ScoreGroup,
    StartEpisode,
    StopKind,
    StopRequested,
    StopRun,
    TicketExpired,
    TrainBatch,
    WeightsLoaded,
)
from rollart_core.scheduling.run_guard import GuardTripped
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.validation_slots import LentPlaces
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Ticket, Trajectory


class TrainerHandle(Protocol):
    """The trainer, in this process or in another one."""

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        """Update the weights on a batch.

        ``progress`` is the used share of ``stop``, for the learning rate schedule.
        """

    async def publish(self, policy_version: int) -> Publication:
        """Publish the current weights on the weight channel."""


class EnginesHandle(Protocol):
    """The engines, behind the router."""

    async def load_weights(self, policy_version: int) -> Sequence[WeightSwap]:
        """Load a version on all engines."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch, from its groups to its publication."""

    groups: tuple[Group, ...]
    policy_version: int
    """Version of the trainer when it took the batch."""
    train_steps: tuple[TrainStepReport, ...]
    publication: Publication
    waited_s: float
    """How long the trainer was idle before the batch."""
    train_s: float


class ScoringHandle(Protocol):
    """The scoring component, as the loop uses it."""

    on_played: Callable[[str, int], None] | None
    """Callback with the ticket and the attempt of an episode that only waits for its score."""

    def score_group(self, ticket_ids: Sequence[str]) -> None:
        """Score the members of a group; all of them wait for it."""


class ValidatorHandle(Protocol):
    """The validation of weights between two batches."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether a version must be validated and has not been validated yet."""

    async def validate(self, policy_version: int, places: LentPlaces | None) -> str | None:
        """Validate the weights of the engines; return why training ends, or None.

        Args:
            policy_version: The version of the engines.
            places: The slots of its episodes while training continues. If None, the validation
                uses all slots.
        """


class Recorder(Protocol):
    """Records what happens: in the journal, trackers, hooks and the progress display."""

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """Record that an attempt begins."""

    def ended(self, trajectory: Trajectory) -> None:
        """Record that an attempt ended, successfully or not."""

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """Record that the scheduler gave something up."""

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """Record that the trainer begins a batch."""

    async def batch_trained(self, record: BatchRecord) -> None:
        """Record that a batch is trained and published; may take a checkpoint."""

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """Record that all engines hold a new version."""


@dataclass(frozen=True, slots=True)
class ControllerDependencies:
    """The components that the controller uses."""

    scheduler: Scheduler
    buffer: Buffer
    run_episode: Callable[[Ticket, int], Awaitable[Trajectory]]
    trainer: TrainerHandle
    engines: EnginesHandle
    keep_group: Callable[[Group], bool]
    recorder: Recorder
    scoring: ScoringHandle | None = None
    """If None, every episode holds its slot until it has its score."""
    drops_equal: bool = False
    """Whether groups are dropped if all their rewards are equal."""
    curriculum: CurriculumTasks | None = None
    """The curriculum, which receives completed groups; None if the run has none."""
    validator: ValidatorHandle | None = None
    """If None, there is no validation."""
    shares_devices: bool = False
    """Whether trainer and engines use the same devices in turns. Engines then load new weights
    after everything that the trainer does for a batch."""
    used_share: Callable[[int], float] | None = None
    """Maps a version to the used share of ``stop``, for a schedule; None if not needed."""


class Controller:
    """The loop of a run; see the module."""

    def __init__(
        self, deps: ControllerDependencies, *, ticket_s: float, wall_s: float | None
    ) -> None:
        """Create the controller.

        Args:
            deps: The components that it uses.
            ticket_s: Deadline over all attempts of a ticket, in seconds.
            wall_s: Stop after this many seconds. If None, there is no limit.
        """
        self._deps = deps
        self._ticket_s = ticket_s
        self._wall_s = wall_s
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest = -1
        self._loading: asyncio.Task[None] | None = None
        self._places = LentPlaces(
            deps.scheduler.policy.max_concurrent, lambda: deps.scheduler.num_running, self._lend
        )
        self._stopped: StopRun | None = None
        self._idle_since = time.perf_counter()

    async def run(self, started: RunStarted) -> StopRun:
        """Run until the scheduler returns ``StopRun`` and the engines hold the newest version.

        A preempted run does not wait for its engines, which may have ended.

        Raises:
            Exception: If a component other than an environment failed permanently. All tasks of the
                run have ended before.
        """
        timer = self._stop_later()
        scoring = self._deps.scoring
        if scoring is not None:
            scoring.on_played = self._played
        try:
            self._handle(started)
            while self._stopped is None:
                event = await self._events.get()
                if isinstance(event, BaseException):
                    raise event
                self._handle(event)
            await self._end_episodes()
            if self._stopped.kind != "preempted":
                await self._finish_loading()
            return self._stopped
        finally:
            if timer is not None:
                timer.cancel()
            if scoring is not None:
                scoring.on_played = None
            await self._end_episodes(*self._tasks)

    def request_stop(self, reason: str, kind: StopKind = "requested") -> None:
        """Request the end of the run; a batch in training is finished first."""
        self._events.put_nowait(StopRequested(reason, kind))

    def fail(self, error: BaseException) -> None:
        """End the run with an error of a component that it requires."""
        self._events.put_nowait(error)

    def _handle(self, event: Event) -> None:
        for action in self._deps.scheduler.handle(event):
            self._act(action)
        self._places.look()

    def _act(self, action: Action) -> None:
        match action:
            case StartEpisode():
                self._start(action.ticket, action.start_version)
            case ScoreGroup():
                assert self._deps.scoring is not None, "ScoreGroup without a scoring component"
                self._deps.scoring.score_group(action.ticket_ids)
            case CompleteGroup():
                self._complete(action)
            case TrainBatch():
                self._spawn(self._train(action))
            case AbortEpisode():
                self._deps.recorder.decided(action)
                self._abort(action)
            case LoseTicket():
                self._deps.recorder.decided(action)
                self._forget_expiry(action.ticket_id)
            case DropGroup():
                self._deps.recorder.decided(action)
                self._deps.buffer.discard(action.group_id)
            case StopRun():
                self._deps.recorder.decided(action)
                self._stopped = action

    # Episodes

    def _start(self, ticket: Ticket, start_version: int) -> None:
        self._deps.recorder.dispatched(ticket, start_version)
        if ticket.ticket_id not in self._expiries:
            expired = TicketExpired(ticket.ticket_id)
            self._expiries[ticket.ticket_id] = asyncio.get_running_loop().call_later(
                self._ticket_s, self._events.put_nowait, expired
            )
        task = asyncio.create_task(self._episode(ticket, start_version))
        self._episodes[ticket.ticket_id] = task
        task.add_done_callback(self._check)

    async def _episode(self, ticket: Ticket, start_version: int) -> None:
        trajectory = await self._deps.run_episode(ticket, start_version)
        if self._episodes.get(ticket.ticket_id) is asyncio.current_task():
            del self._episodes[ticket.ticket_id]
        self._deps.recorder.ended(trajectory)
        if trajectory.failure is not None:
            event = EpisodeFailed(ticket.ticket_id, ticket.attempt, trajectory.failure)
            self._events.put_nowait(event)
            return
        self._forget_expiry(ticket.ticket_id)
        self._deps.buffer.add(trajectory)
        self._events.put_nowait(
            EpisodeFinished(ticket.ticket_id, ticket.attempt, trajectory.oldest_version)
        )

    def _played(self, ticket_id: str, attempt: int) -> None:
        self._events.put_nowait(EpisodePlayed(ticket_id, attempt))

    def _abort(self, action: AbortEpisode) -> None:
        self._forget_expiry(action.ticket_id)
        task = self._episodes.pop(action.ticket_id, None)
        if task is not None:
            task.cancel()

    def _forget_expiry(self, ticket_id: str) -> None:
        handle = self._expiries.pop(ticket_id, None)
        if handle is not None:
            handle.cancel()

    # Groups and batches

    def _complete(self, action: CompleteGroup) -> None:
        group = self._deps.buffer.complete(action.group_id, action.lost)
        if self._deps.curriculum:
            self._deps.curriculum.heed(group)
        if self._deps.drops_equal and _all_equal(group):
            self._events.put_nowait(GroupFiltered(action.group_id, "equal"))
            return
        kept = self._deps.keep_group(group)
        self._events.put_nowait((GroupKept if kept else GroupFiltered)(action.group_id))

    async def _train(self, action: TrainBatch) -> None:
        groups = self._deps.buffer.take(action.group_ids)
        self._deps.recorder.batch_taken(groups, action.policy_version)
        began = time.perf_counter()
        version, used = action.policy_version, self._deps.used_share
        progress = used(version) if used is not None else None
        reports = await self._deps.trainer.train_batch(groups, version, progress=progress)
        publication = await self._deps.trainer.publish(action.policy_version + 1)
        if not self._deps.shares_devices:
            self._load(publication.policy_version)
        record = BatchRecord(
            groups=tuple(groups),
            policy_version=action.policy_version,
            train_steps=tuple(reports),
            publication=publication,
            waited_s=began - self._idle_since,
            train_s=time.perf_counter() - began,
        )
        if self._deps.curriculum:
            self._deps.curriculum.turn()
        try:
            await self._deps.recorder.batch_trained(record)
        except GuardTripped:
            if self._loading is not None:  # let the engines finish their swap
                await asyncio.wait([self._loading])
            raise
        if self._deps.shares_devices:
            self._load(publication.policy_version)
        await self._validate(publication.policy_version)
        self._idle_since = time.perf_counter()
        self._events.put_nowait(BatchTrained(publication.policy_version))

    async def _validate(self, policy_version: int) -> None:
        """Validate a version if it is due; no batch is trained meanwhile, so engines keep it."""
        validator = self._deps.validator
        if validator is None or not validator.is_due(policy_version):
            return
        if self._loading is not None:
            await asyncio.wait([self._loading])
            if self._loading.exception() is not None:
                return  # the error ends the run
        if reason := await validator.validate(policy_version, self._places):
            self.request_stop(reason)

    def _lend(self, num_places: int) -> None:
        self._events.put_nowait(PlacesLent(num_places))

    def _load(self, policy_version: int) -> None:
        """Load the newest version on the engines; older unloaded versions are skipped."""
        self._newest = policy_version
        if self._loading is None or self._loading.done():
            self._loading = self._spawn(self._load_newest())

    async def _load_newest(self) -> None:
        loaded = -1
        while loaded < self._newest:
            loaded = self._newest
            swaps = await self._deps.engines.load_weights(loaded)
            self._deps.recorder.swapped(swaps)
            self._events.put_nowait(WeightsLoaded(loaded))

    async def _finish_loading(self) -> None:
        """Wait until the engines hold the newest version, which is evaluated next.

        Raises:
            Exception: If they cannot load it, or a component that they need for it is lost.
        """
        if self._loading is None:
            return
        while not self._loading.done():
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
        self._loading.result()

    # Beginning and end

    def _stop_later(self) -> asyncio.TimerHandle | None:
        if self._wall_s is None:
            return None
        reason = f"stop.wall_s: the limit of {round(self._wall_s, 2):g} s of training is reached"
        return asyncio.get_running_loop().call_later(self._wall_s, self.request_stop, reason)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = keep_until_done(asyncio.ensure_future(work), self._tasks)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        """Pass an unexpected error of a task to the loop, where it ends the run."""
        if self._stopped is not None and task is not self._loading:
            return  # an episode that was cancelled at the end
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(error)

    async def _end_episodes(self, *others: asyncio.Task[None]) -> None:
        """Cancel the episodes and other tasks, all at once, and wait until they have ended."""
        for ticket_id in list(self._expiries):
            self._forget_expiry(ticket_id)
        await cancel_and_wait(*others, *self._episodes.values())
        self._episodes.clear()


def _all_equal(group: Group) -> bool:
    return len({t.reward for t in group.trajectories}) == 1
