"""The scheduler of episodes and batches: events in, actions out.

    RunStarted, WeightsLoaded ----+
    EpisodePlayed ----------------|                    +--> StartEpisode, AbortEpisode, LoseTicket
    EpisodeFinished / -Failed ----|                    +--> ScoreGroup
    TicketExpired ----------------|--> Scheduler.handle --> CompleteGroup, DropGroup
    GroupKept / GroupFiltered ----|                    +--> TrainBatch
    BatchTrained, StopRequested --+                    +--> StopRun
    PlacesLent -------------------+

Takes: one event at a time. Gives: the actions it unblocks. Never: does I/O, reads a clock or waits.

How staleness stays bounded. Let ``n`` be the trainer version at which the next batch will be
consumed (the current version, or one more while a batch trains), ``S`` the bound and ``G`` the
number of groups per batch. A group whose oldest member began at version ``w`` has the deadline
``w + S``: the last batch that may contain it. A schedule is feasible if, for every ``d``, at most
``G * (d - n + 1)`` unconsumed groups have a deadline of ``d`` or less. Admission keeps the schedule
feasible. A new group has the largest deadline of all, so one inequality is sufficient. A batch is
taken, earliest deadline first, only if the remaining groups stay feasible. So a waiting trainer can
always continue: once all unconsumed groups are complete, the batch can be taken. With
``on_stale="drop"``, groups that would be infeasible after the batch are aborted, and the trainer
does not wait for them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol, cast

from rollart_core.scheduling.events import (
    REDUNDANT,
    AbortEpisode,
    Action,
    BatchTrained,
    CompleteGroup,
    DropGroup,
    DropReason,
    EpisodeFailed,
    EpisodeFinished,
    EpisodePlayed,
    Event,
    GroupFiltered,
    GroupKept,
    LoseTicket,
    PlacesLent,
    ReturningGroup,
    RunStarted,
    SchedulePolicy,
    ScoreGroup,
    Snapshot,
    StartEpisode,
    StopKind,
    StopRequested,
    StopRun,
    TicketExpired,
    TrainBatch,
    WeightsLoaded,
)
from rollart_core.scheduling.failure_rate import Attempts, RetryBudget
from rollart_core.scheduling.staleness import StalenessBound, first_excess
from rollart_core.types import Failure, FailureKind, Task, Ticket


class Tasks(Protocol):
    """The interface of a task source that the scheduler uses."""

    def next(self) -> Task:
        """Return the next task."""

    def requeue(self, task: Task) -> None:
        """Put a task back; it is returned before all new tasks."""


_State = Literal["queued", "running", "played", "scoring", "finished", "lost", "redundant"]
"""``played``: the episode ended and holds no slot; it is scored with its group once all members
ended. ``scoring``: it holds no slot, and its score is requested."""


@dataclass(slots=True, eq=False)
class _Member:
    """One ticket of a group."""

    ticket: Ticket
    group: _Group
    state: _State = "queued"
    version: int = -1
    """The version it began with; after it has finished, its oldest version."""
    budget: RetryBudget = field(default_factory=RetryBudget)
    """The retries in this incarnation of the run; a resumed run counts again from 0."""
    last_failure: str = ""
    """Why the attempt before this one failed; empty for the first one."""


@dataclass(slots=True, eq=False)
class _Group:
    """One admitted, unconsumed group."""

    group_id: str
    ordinal: int
    task: Task
    deadline: int
    """The last trainer version at which it may be consumed."""
    members: list[_Member] = field(default_factory=list)
    state: Literal["running", "judged", "ready"] = "running"

    @property
    def num_unsettled(self) -> int:
        return sum(m.state in _UNSETTLED for m in self.members)

    @property
    def num_waiting(self) -> int:
        """The number of members that have ended and wait for their score."""
        return sum(m.state in _WAITING for m in self.members)

    @property
    def num_finished(self) -> int:
        return sum(m.state == "finished" for m in self.members)

    @property
    def oldest_version(self) -> int | None:
        return min((m.version for m in self.members if m.state in _LIVE), default=None)


_WAITING = ("played", "scoring")
_EXECUTED = ("running", *_WAITING)
_UNSETTLED = ("queued", *_EXECUTED)
_LIVE = (*_EXECUTED, "finished")


class Scheduler:
    """The state of a schedule. Cost per event: O(groups_per_batch + max_staleness + group_size)."""

    def __init__(self, policy: SchedulePolicy, tasks: Tasks) -> None:
        self.policy = policy
        self._tasks = tasks
        self._version = 0
        self._engine_version = 0
        self._next_ordinal = 0
        self._training = False
        self._phase: Literal["new", "going", "stopping", "stopped"] = "new"
        self._stop: StopRun | None = None
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, _Member] = {}
        self._returning: deque[ReturningGroup] = deque()
        self._retries: deque[_Member] = deque()
        self._queue: deque[_Member] = deque()
        self._num_running = 0
        self._num_lent = 0
        self._unconsumed = StalenessBound()
        self._ready = StalenessBound()
        self._attempts = Attempts(policy.failure_window)
        self._num_equal = 0
        self._counts = _Counts()
        self._actions: list[Action] = []

    @property
    def num_running(self) -> int:
        """The number of episodes that hold a slot."""
        return self._num_running

    def handle(self, event: Event) -> list[Action]:
        """Process one event and return the actions to execute, in order.

        Late events are ignored: events of an older attempt, of a settled or unknown ticket or
        group, and all events after ``StopRun``.
        """
        if self._phase != "stopped":
            handler = cast("Callable[[Scheduler, Event], None]", _HANDLERS[type(event)])
            handler(self, event)
            self._advance()
        actions, self._actions = self._actions, []
        return actions

    def snapshot(self) -> Snapshot:
        """Return the counters and gauges."""
        return Snapshot(
            policy_version=self._version,
            num_running=self._num_running,
            num_scoring=sum(m.state in _WAITING for m in self._members.values()),
            num_open_groups=len(self._unconsumed) - len(self._ready),
            num_ready_groups=len(self._ready),
            **asdict(self._counts),
        )

    # Events

    def _on_run_started(self, event: RunStarted) -> None:
        assert self._phase == "new", "RunStarted comes once, first"
        self._phase = "going"
        self._version = self._engine_version = event.policy_version
        self._next_ordinal = event.next_ordinal
        self._returning.extend(event.returning)

    def _on_episode_played(self, event: EpisodePlayed) -> None:
        member = self._executed_member(event.ticket_id, event.attempt)
        if member is None or member.state != "running":
            return
        if self._scored_together(member.group):
            self._leave_running(member, "played")
            self._score_group(member.group)
        else:
            self._leave_running(member, "scoring")

    def _on_episode_finished(self, event: EpisodeFinished) -> None:
        member = self._executed_member(event.ticket_id, event.attempt)
        if member is None:
            return
        self._leave_running(member, "finished")
        member.version = event.oldest_version
        self._counts.finished += 1
        self._attempts.add(member.ticket.task.env_id, None)
        if self._scored_together(member.group):
            self._lose_unscored(member.group)
        self._settle(member.group)

    def _on_episode_failed(self, event: EpisodeFailed) -> None:
        member = self._executed_member(event.ticket_id, event.attempt)
        if member is None:
            return
        ticket = member.ticket
        self._count_failure(ticket.task.env_id, event.failure)
        member.last_failure = f"{event.failure.kind}: {event.failure.message}"
        again = event.failure.retryable and not self._has_scores(member.group)
        if again and member.budget.take(event.failure, self.policy.max_retries):
            self._leave_running(member, "queued")
            member.ticket = Ticket(
                ticket.ticket_id, ticket.task, ticket.group_id, ticket.index, ticket.attempt + 1
            )
            self._retries.append(member)
            self._counts.retried += 1
        else:
            self._lose(member, member.last_failure)
            self._settle(member.group)

    def _on_ticket_expired(self, event: TicketExpired) -> None:
        member = self._members.get(event.ticket_id)
        if member is None or member.state not in _UNSETTLED:
            return
        reason = "the deadline over all attempts passed"
        if member.state in _EXECUTED:
            self._actions.append(AbortEpisode(event.ticket_id, reason))
            failure = Failure(FailureKind.TIMEOUT, "ticket", reason, retryable=False)
            self._count_failure(member.ticket.task.env_id, failure)
        self._lose(member, f"{FailureKind.TIMEOUT}: {reason}")
        self._settle(member.group)

    def _on_group_kept(self, event: GroupKept) -> None:
        group = self._groups.get(event.group_id)
        if group is not None and group.state == "judged":
            group.state = "ready"
            self._ready.add(group.deadline)
            self._num_equal = 0

    def _on_group_filtered(self, event: GroupFiltered) -> None:
        group = self._groups.get(event.group_id)
        if group is None or group.state != "judged":
            return
        self._drop(group, event.reason)
        self._num_equal += event.reason == "equal"
        limit = self.policy.max_equal_groups
        if limit is not None and self._num_equal >= limit:
            self._begin_stop(
                f"the rewards of {self._num_equal} groups in a row were all equal, so these groups "
                "give no gradient: make the tasks easier or harder, warm up the policy, or raise "
                "rollout.max_equal_groups",
                "failures",
            )

    def _on_weights_loaded(self, event: WeightsLoaded) -> None:
        self._engine_version = max(self._engine_version, event.policy_version)

    def _on_batch_trained(self, event: BatchTrained) -> None:
        assert self._training, "BatchTrained without TrainBatch"
        assert event.policy_version == self._version + 1, "one publication follows each batch"
        self._training = False
        self._version = event.policy_version
        self._counts.batches += 1

    def _on_stop_requested(self, event: StopRequested) -> None:
        self._begin_stop(event.reason, event.kind)

    def _on_places_lent(self, event: PlacesLent) -> None:
        self._num_lent = event.num_places

    # Members and groups

    def _executed_member(self, ticket_id: str, attempt: int) -> _Member | None:
        member = self._members.get(ticket_id)
        if member is None or member.state not in _EXECUTED or member.ticket.attempt != attempt:
            return None
        return member

    def _leave_running(self, member: _Member, state: _State) -> None:
        self._num_running -= member.state == "running"
        member.state = state

    def _lose(self, member: _Member, reason: str) -> None:
        self._leave_running(member, "lost")
        self._counts.lost += 1
        self._actions.append(LoseTicket(member.ticket.ticket_id, reason))

    def _settle(self, group: _Group) -> None:
        if group.num_finished >= self.policy.group_size:
            self._abort_rest(group)
        self._update_deadline(group)
        if group.num_unsettled:
            if self._scored_together(group):
                self._score_group(group)
            return
        if group.num_finished < self.policy.min_group_size:
            self._drop(group, "too_small", requeue=self.policy.requeues_small)
            return
        group.state = "judged"
        missing = tuple(m.ticket.index for m in group.members if m.state != "finished")
        self._actions.append(CompleteGroup(group.group_id, missing))

    def _scored_together(self, group: _Group) -> bool:
        return group.task.env_id in self.policy.scored_together

    def _has_scores(self, group: _Group) -> bool:
        """Return whether a group has been scored together; later members cannot be scored."""
        return self._scored_together(group) and group.num_finished > 0

    def _score_group(self, group: _Group) -> None:
        """Request the score of a group once all needed or remaining members wait for it."""
        if group.num_waiting >= self.policy.group_size:
            self._abort_rest(group, keep=_WAITING)
        if group.num_waiting < group.num_unsettled:
            return  # other members still run
        if group.num_finished + group.num_waiting < self.policy.min_group_size:
            self._drop(group, "too_small", requeue=self.policy.requeues_small)
        elif all(m.state != "scoring" for m in group.members):  # else: wait for those scores
            played = [m for m in group.members if m.state == "played"]
            for member in played:
                member.state = "scoring"
            ticket_ids = tuple(m.ticket.ticket_id for m in played)
            self._actions.append(ScoreGroup(group.group_id, ticket_ids))

    def _lose_unscored(self, group: _Group) -> None:
        """Lose the members that failed and were retried while their siblings got scores."""
        for member in group.members:
            if member.state not in _UNSETTLED or member.state == "scoring":
                continue
            if member.state in _EXECUTED:
                reason = "its siblings have been scored without it"
                self._actions.append(AbortEpisode(member.ticket.ticket_id, reason))
            self._lose(member, member.last_failure)

    def _abort_rest(self, group: _Group, *, keep: Container[str] = ()) -> None:
        """Abort the members that are not needed; they do not count as failed or retried."""
        for member in group.members:
            if member.state not in _UNSETTLED or member.state in keep:
                continue
            if member.state in _EXECUTED or member.last_failure:
                self._counts.aborted += 1
                self._actions.append(AbortEpisode(member.ticket.ticket_id, REDUNDANT))
            self._leave_running(member, "redundant")
            self._counts.redundant += 1

    def _update_deadline(self, group: _Group) -> None:
        oldest = group.oldest_version
        deadline = group.deadline if oldest is None else oldest + self.policy.staleness_bound
        if deadline != group.deadline:
            self._unconsumed.move(group.deadline, deadline)
            group.deadline = deadline

    def _forget(self, group: _Group) -> None:
        self._unconsumed.remove(group.deadline)
        if group.state == "ready":
            self._ready.remove(group.deadline)
        del self._groups[group.group_id]
        for member in group.members:
            del self._members[member.ticket.ticket_id]

    def _drop(self, group: _Group, reason: DropReason, *, requeue: bool = False) -> None:
        for member in group.members:
            if member.state in _EXECUTED:
                self._leave_running(member, "lost")
                self._counts.aborted += 1
                self._actions.append(AbortEpisode(member.ticket.ticket_id, reason))
            elif member.state == "queued":
                member.state = "lost"
        self._forget(group)
        self._counts.drop(reason)
        if requeue:
            self._tasks.requeue(group.task)
            self._counts.requeued += 1
        self._actions.append(DropGroup(group.group_id, reason, requeue))

    def _count_failure(self, env_id: str, failure: Failure) -> None:
        failed = self._counts.failed
        failed[failure.kind] = failed.get(failure.kind, 0) + 1
        self._attempts.add(env_id, failure)
        reason = self._attempts.excess(self.policy.max_failure_rate)
        if reason is not None:
            self._begin_stop(reason, "failures")

    # Actions that an event may unblock

    def _advance(self) -> None:
        if self._phase == "new":
            return
        done = self.policy.num_batches
        if done is not None and self._version >= done and self._phase == "going":
            self._begin_stop("done", "done")
        if self._phase == "stopping":
            self._finish_stop()
            return
        self._drop_infeasible()
        self._take_batch()
        self._drop_infeasible()
        self._dispatch()

    @property
    def _next_batch(self) -> int:
        """The trainer version at which the next batch will be consumed."""
        return self._version + self._training

    def _take_batch(self) -> None:
        size = self.policy.groups_per_batch
        if self._training or len(self._ready) < size:
            return
        rest = self._unconsumed.without(self._ready.earliest(size))
        if not self.policy.drops_stale and first_excess(rest, size, self._next_batch + 1):
            return
        batch = heapq.nsmallest(size, self._groups_in("ready"), key=_by_deadline)
        for group in batch:
            self._counts.trained += group.num_finished
            self._forget(group)
        self._training = True
        ids = tuple(g.group_id for g in sorted(batch, key=_by_ordinal))
        self._actions.append(TrainBatch(ids, self._version))

    def _drop_infeasible(self) -> None:
        """Drop the groups that no schedule can train in time.

        After a batch with ``on_stale="drop"``, these are the stragglers that it did not wait for.
        Otherwise there are none, unless an episode reports tokens older than its start.
        """
        size = self.policy.groups_per_batch
        while excess := first_excess(self._unconsumed.counts, size, self._next_batch):
            deadline, num_excess = excess
            late = [g for g in self._groups.values() if g.deadline <= deadline]
            # Drop incomplete groups before complete ones, and the youngest first: least work lost.
            late.sort(key=lambda g: (g.state != "running", -g.ordinal))
            for group in late[:num_excess]:
                self._drop(group, "too_stale", requeue=True)

    def _dispatch(self) -> None:
        while self._num_running + self._num_lent < self.policy.max_concurrent:
            member = self._next_queued()
            if member is None:
                if not self._may_admit():
                    return
                self._admit()
            else:
                self._start(member)

    def _next_queued(self) -> _Member | None:
        for queue in (self._retries, self._queue):
            while queue:
                member = queue.popleft()
                if member.state == "queued":
                    return member
        return None

    def _start(self, member: _Member) -> None:
        member.state = "running"
        member.version = self._engine_version
        self._num_running += 1
        self._counts.dispatched += 1
        self._update_deadline(member.group)
        self._actions.append(StartEpisode(member.ticket, member.version))

    def _may_admit(self) -> bool:
        """Return whether a group that begins now can be trained in time and within the run."""
        last = self._engine_version + self.policy.staleness_bound
        if self.policy.num_batches is not None:
            last = min(last, self.policy.num_batches - 1)
        capacity = self.policy.groups_per_batch * (last - self._next_batch + 1)
        return len(self._unconsumed) < capacity

    def _admit(self) -> None:
        came = self._returning.popleft() if self._returning else self._new()
        deadline = self._engine_version + self.policy.staleness_bound
        group = _Group(came.group_id, came.ordinal, came.task, deadline)
        for i in range(max(self.policy.num_members, len(came.attempts))):
            attempt = came.attempts[i] if i < len(came.attempts) else 0
            ticket = Ticket(f"{came.group_id}.{i}", came.task, came.group_id, i, attempt)
            member = _Member(ticket, group)
            group.members.append(member)
            self._members[ticket.ticket_id] = member
            self._queue.append(member)
        self._counts.returned += bool(came.attempts)
        self._groups[came.group_id] = group
        self._unconsumed.add(deadline)

    def _new(self) -> ReturningGroup:
        """Return a new group."""
        ordinal = self._next_ordinal
        self._next_ordinal += 1
        return ReturningGroup(f"g{ordinal:07d}", ordinal, self._tasks.next())

    def _groups_in(self, state: str) -> Iterable[_Group]:
        return (g for g in self._groups.values() if g.state == state)

    # The end

    def _begin_stop(self, reason: str, kind: StopKind) -> None:
        if self._phase in ("new", "going"):
            self._phase = "stopping"
            self._stop = StopRun(reason, kind)

    def _finish_stop(self) -> None:
        for group in list(self._groups.values()):
            self._drop(group, "stopped")
        while self._returning:
            came = self._returning.popleft()
            self._counts.drop("stopped")
            self._actions.append(DropGroup(came.group_id, "stopped"))
        if not self._training:
            assert self._stop is not None
            self._phase = "stopped"
            self._actions.append(self._stop)


_HANDLERS: Mapping[type, object] = {
    RunStarted: Scheduler._on_run_started,
    EpisodePlayed: Scheduler._on_episode_played,
    EpisodeFinished: Scheduler._on_episode_finished,
    EpisodeFailed: Scheduler._on_episode_failed,
    TicketExpired: Scheduler._on_ticket_expired,
    GroupKept: Scheduler._on_group_kept,
    GroupFiltered: Scheduler._on_group_filtered,
    WeightsLoaded: Scheduler._on_weights_loaded,
    BatchTrained: Scheduler._on_batch_trained,
    StopRequested: Scheduler._on_stop_requested,
    PlacesLent: Scheduler._on_places_lent,
}


def _by_deadline(group: _Group) -> tuple[int, int]:
    return group.deadline, group.ordinal


def _by_ordinal(group: _Group) -> int:
    return group.ordinal


@dataclass(slots=True)
class _Counts:
    """Counters of the whole run; see :class:`Snapshot`."""

    dispatched: int = 0
    finished: int = 0
    failed: dict[FailureKind, int] = field(default_factory=dict)
    retried: int = 0
    lost: int = 0
    aborted: int = 0
    redundant: int = 0
    trained: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)
    requeued: int = 0
    returned: int = 0
    batches: int = 0

    def drop(self, reason: DropReason) -> None:
        """Count a dropped group."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
