"""The schedule under random orders of events: the promises hold and it never gets stuck."""

import random
from collections import Counter
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

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
    ReturningGroup,
    RunStarted,
    SchedulePolicy,
    ScoreGroup,
    StartEpisode,
    StopRequested,
    StopRun,
    TicketExpired,
    TrainBatch,
    WeightsLoaded,
)
from rollart_core.scheduling.failure_rate import MAX_REPLAYS
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Failure, FailureKind, Ticket

ENV = "fake/Env-v0"
TOGETHER = frozenset([ENV])
TIMEOUT = "timeout: the deadline over all attempts passed"


class World:
    """Engines, trainer and environments that answer in a random order, and a strict bookkeeper."""

    def __init__(
        self,
        policy: SchedulePolicy,
        rng: random.Random,
        chaos: float,
        begins: RunStarted | None = None,
    ) -> None:
        self.policy = policy
        self.begins = begins or RunStarted()
        self.first_attempts = {
            f"{g.group_id}.{i}": attempt
            for g in self.begins.returning
            for i, attempt in enumerate(g.attempts)
        }
        self.attempts: dict[str, Ticket] = {}
        self.trained_at: dict[str, int] = {}
        self.rng = rng
        self.chaos = chaos
        self.scheduler = Scheduler(policy, TaskSource(ENV, "train", 20, 0))
        self.engine = self.trainer = self.begins.policy_version
        self.training = False
        self.running: dict[str, tuple[Ticket, int]] = {}
        self.played: dict[str, Literal["waits", "scored", "unscored"]] = {}
        """Of the running: those whose group is scored together; its score came, or failed."""
        self.failures: dict[str, str] = {}
        self.num_replays: Counter[str] = Counter()
        self.enough: set[str] = set()
        """Groups of which as many as are needed have played."""
        self.to_judge: list[str] = []
        self.oldest: dict[str, int] = {}
        self.settled: dict[str, str] = {}
        self.started: set[str] = set()
        self.history: list[Event] = []
        self.stopped: StopRun | None = None
        self.spare: set[str] = set()
        self.dropped: set[str] = set()

    def possible(self) -> list[Event]:
        """One event of each kind that the world could bring now."""
        events: list[Event] = []
        able = [running for t, running in self.running.items() if self.played.get(t) != "waits"]
        if able:
            events += [self.episode_end(*self.rng.choice(able))] * 4
        if self.to_judge:
            group = self.rng.choice(self.to_judge)
            drop = self.rng.random() < self.chaos / 2
            events.append(GroupFiltered(group) if drop else GroupKept(group))
        if self.training:
            events.append(BatchTrained(self.trainer + 1))
        if self.engine < self.trainer:
            events.append(WeightsLoaded(self.rng.randint(self.engine + 1, self.trainer)))
        waiting = [t for t, state in self.played.items() if state == "waits"]
        if events and waiting and self.rng.random() < self.chaos * 0.1:
            events.append(TicketExpired(self.rng.choice(waiting)))  # never the only way on
        return events

    def episode_end(self, ticket: Ticket, start: int) -> Event:
        chance = self.rng.random()
        state = self.played.get(ticket.ticket_id)
        if chance < self.chaos * 0.1:
            return TicketExpired(ticket.ticket_id)
        if chance < self.chaos or state == "unscored":
            kind = self.rng.choice(list(FailureKind))
            message = f"boom {self.rng.random()}"
            failure = Failure(kind, "env.step", message, retryable=self.rng.random() < 0.7)
            return EpisodeFailed(ticket.ticket_id, ticket.attempt, failure)
        if self.policy.scored_together and state is None:
            return EpisodePlayed(ticket.ticket_id, ticket.attempt)
        # An engine may answer with weights that not all engines hold yet.
        oldest = self.rng.randint(start, self.trainer)
        return EpisodeFinished(ticket.ticket_id, ticket.attempt, oldest)

    def step(self, event: Event) -> None:
        if self.history and self.rng.random() < 0.1:
            late = self.rng.choice(self.history)
            if self.is_late(late):
                assert self.scheduler.handle(late) == []
        self.history.append(event)
        self.note(event)
        self.apply(self.scheduler.handle(event))
        assert len(self.running) - len(self.played) <= self.policy.max_concurrent

    def is_late(self, event: Event) -> bool:
        match event:
            case EpisodeFinished(ticket_id, attempt) | EpisodeFailed(ticket_id, attempt):
                running = self.running.get(ticket_id)
                return running is None or running[0].attempt > attempt
            case EpisodePlayed(ticket_id, attempt):
                running = self.running.get(ticket_id)
                return running is None or running[0].attempt > attempt or ticket_id in self.played
            case GroupKept(group) | GroupFiltered(group):
                return group not in self.to_judge
        return False

    def note(self, event: Event) -> None:
        match event:
            case EpisodePlayed(ticket_id):
                self.played[ticket_id] = "waits"
            case EpisodeFinished(ticket_id, _, oldest):
                self.end(ticket_id)
                self.oldest[ticket_id] = oldest
            case EpisodeFailed(ticket_id, _, failure):
                self.end(ticket_id)
                self.failures[ticket_id] = f"{failure.kind}: {failure.message}"
                self.num_replays[ticket_id] += failure.is_infrastructure
            case TicketExpired(ticket_id):
                self.failures[ticket_id] = TIMEOUT
            case GroupKept(group) | GroupFiltered(group):
                self.to_judge.remove(group)
            case BatchTrained(version):
                self.training, self.trainer = False, version
            case WeightsLoaded(version):
                self.engine = version

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.stopped is None, f"{action} after {self.stopped}"
            match action:
                case StartEpisode(ticket, start):
                    assert start == self.engine
                    assert ticket.ticket_id not in self.running
                    assert ticket.ticket_id not in self.settled
                    first = self.first_attempts.get(ticket.ticket_id, 0)
                    assert (ticket.ticket_id in self.started) == (ticket.attempt > first)
                    num_replays = min(self.num_replays[ticket.ticket_id], MAX_REPLAYS)
                    assert first <= ticket.attempt - num_replays <= first + self.policy.max_retries
                    self.started.add(ticket.ticket_id)
                    self.attempts[ticket.ticket_id] = ticket
                    self.running[ticket.ticket_id] = ticket, start
                case AbortEpisode(ticket_id, "redundant"):
                    if ticket_id in self.running:  # or it was waiting for a retry
                        self.end(ticket_id)
                    self.spare.add(ticket_id)
                    self.settle(ticket_id, "redundant")
                case AbortEpisode(ticket_id, _):
                    self.end(ticket_id)
                case LoseTicket(ticket_id, reason):
                    assert ticket_id not in self.running
                    assert reason == self.failures[ticket_id]
                    self.settle(ticket_id, "lost")
                case ScoreGroup(group, ticket_ids):
                    self.score(group, ticket_ids)
                case CompleteGroup(group, lost):
                    members = [f"{group}.{i}" for i in range(self.policy.num_members)]
                    done = [t for t in members if t in self.oldest]
                    assert len(done) == len(members) - len(lost) >= self.policy.min_group_size
                    assert len(done) <= self.policy.group_size
                    assert not self.spare & set(done)
                    gone = [t for t in members if self.settled.get(t) == "lost"]
                    # None is given up while the group needs it.
                    assert (
                        len(done) == self.policy.group_size
                        or len(done) + len(gone) == len(members)
                        or group in self.enough
                    )
                    self.to_judge.append(group)
                case DropGroup(group, reason, requeued):
                    self.dropped.add(group)
                    small = self.policy.requeues_small and reason == "too_small"
                    assert requeued == (small or reason == "too_stale")
                    if group in self.to_judge:
                        self.to_judge.remove(group)
                    for ticket_id in self.members(group):
                        assert ticket_id not in self.running
                        if self.settled.get(ticket_id) not in ("lost", "redundant"):
                            self.settle(ticket_id, reason)
                case TrainBatch():
                    self.train(action)
                case StopRun():
                    self.stopped = action

    def score(self, group: str, ticket_ids: tuple[str, ...]) -> None:
        """Score a group as a whole: all of its members that wait, and no attempt twice."""
        assert self.policy.min_group_size <= len(ticket_ids) <= self.policy.group_size
        there = [t for t in self.members(group) if t in self.running]
        assert list(ticket_ids) == there
        assert {self.played.get(t) for t in there} == {"waits"}
        assert not self.oldest.keys() & set(self.members(group)), "some have another score"
        if len(ticket_ids) == self.policy.group_size:
            self.enough.add(group)
        failed = self.rng.random() < self.chaos / 2
        self.played.update(dict.fromkeys(ticket_ids, "unscored" if failed else "scored"))

    def end(self, ticket_id: str) -> None:
        del self.running[ticket_id]
        self.played.pop(ticket_id, None)

    def train(self, batch: TrainBatch) -> None:
        assert not self.training
        assert batch.policy_version == self.trainer
        assert len(set(batch.group_ids)) == self.policy.groups_per_batch
        self.training = True
        for group in batch.group_ids:
            assert group not in self.to_judge
            for ticket_id in self.members(group):
                if self.settled.get(ticket_id) not in ("lost", "redundant"):
                    staleness = self.trainer - self.oldest[ticket_id]
                    assert 0 <= staleness <= self.policy.staleness_bound
                    self.settle(ticket_id, "trained")
            self.trained_at[group] = self.trainer

    def settle(self, ticket_id: str, how: str) -> None:
        assert ticket_id not in self.settled
        self.settled[ticket_id] = how

    def members(self, group: str) -> list[str]:
        ids = [f"{group}.{i}" for i in range(self.policy.num_members)]
        return [t for t in ids if t in self.started]

    def run(self, stop_after: int | None, kill_after: int | None = None) -> None:
        self.apply(self.scheduler.handle(self.begins))
        for i in range(20_000):
            if self.stopped:
                break
            if i == kill_after:
                return
            if i == stop_after:
                self.step(StopRequested("enough"))
                continue
            events = self.possible()
            assert events, f"stuck: {self.scheduler.snapshot()}"
            self.step(self.rng.choice(events))
        assert self.stopped, f"no end in sight: {self.scheduler.snapshot()}"
        assert not self.running
        assert set(self.settled) >= self.started
        self.check_counts()

    def comeback(self, version: int) -> RunStarted:
        """What begins the next life when this one was killed and had a checkpoint of a version."""
        groups: dict[str, list[Ticket]] = {}
        for ticket in self.attempts.values():
            groups.setdefault(ticket.group_id, []).append(ticket)
        ended = {g for g, at in self.trained_at.items() if at < version} | self.dropped
        returning = []
        for group_id in sorted(groups.keys() - ended):
            nexts = {t.index: t.attempt + 1 for t in groups[group_id]}
            attempts = tuple(nexts.get(i, 0) for i in range(max(nexts) + 1))
            task = groups[group_id][0].task
            returning.append(ReturningGroup(group_id, int(group_id[1:]), task, attempts))
        return RunStarted(version, len(groups), tuple(returning))

    def check_counts(self) -> None:
        counts = self.scheduler.snapshot()
        hows = list(self.settled.values())
        assert counts.trained == hows.count("trained")
        assert counts.lost == hows.count("lost")
        assert counts.redundant >= hows.count("redundant")
        assert counts.num_running == counts.num_open_groups == counts.num_ready_groups == 0
        assert counts.num_scoring == 0
        assert counts.batches == self.trainer - self.begins.policy_version


@st.composite
def policies(draw: st.DrawFn) -> SchedulePolicy:
    group_size = draw(st.integers(1, 4))
    return SchedulePolicy(
        groups_per_batch=draw(st.integers(1, 4)),
        group_size=group_size,
        min_group_size=draw(st.integers(1, group_size)),
        requeues_small=draw(st.booleans()),
        max_concurrent=draw(st.integers(1, 24)),
        redundant=draw(st.sampled_from([0, 0, 1, 3])),
        max_staleness=draw(st.integers(0, 4)),
        on_stale=draw(st.sampled_from(["wait", "drop"])),
        mode=draw(st.sampled_from(["sync", "async", "async"])),
        max_retries=draw(st.integers(0, 2)),
        num_batches=draw(st.integers(1, 6)),
        scored_together=draw(st.sampled_from([frozenset(), TOGETHER])),
    )


@settings(max_examples=100, deadline=None)
@given(policies(), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
def test_every_promise_holds_under_any_order(
    policy: SchedulePolicy, seed: int, chaos: float
) -> None:
    world = World(policy, random.Random(seed), chaos)
    world.run(stop_after=None)
    assert world.stopped == StopRun("done", "done")
    assert world.trainer == policy.num_batches
    if chaos == 0 and not policy.drops_stale:
        # Nothing is wasted where nothing fails and the trainer waits.
        assert set(world.settled.values()) <= {"trained", "redundant"}
        assert world.policy.redundant or "redundant" not in world.settled.values()


@settings(max_examples=40, deadline=None)
@given(policies(), st.integers(0, 2**32), st.integers(0, 60))
def test_a_stop_at_any_moment_settles_everything(
    policy: SchedulePolicy, seed: int, stop_after: int
) -> None:
    world = World(policy, random.Random(seed), 0.2)
    world.run(stop_after)
    assert world.stopped is not None
    assert world.stopped.kind in ("done", "requested")


@settings(max_examples=60, deadline=None)
@given(policies(), st.integers(0, 2**32), st.integers(1, 80))
def test_what_a_kill_cut_off_comes_back_and_is_settled_once(
    policy: SchedulePolicy, seed: int, kill_after: int
) -> None:
    rng = random.Random(seed)
    first = World(policy, rng, 0.2)
    first.run(None, kill_after)
    begins = first.comeback(rng.randint(max(0, first.trainer - 2), first.trainer))
    second = World(policy, rng, 0.2, begins)
    second.run(stop_after=None)
    back = {g.group_id for g in begins.returning}
    gone_on = {g for g in second.trained_at if g in back} | (second.dropped & back)
    assert gone_on == back
    kept = {g for g, at in first.trained_at.items() if at < begins.policy_version}
    assert not kept & second.trained_at.keys()
    # New groups have new numbers, and come after all that came back unless those are too many.
    assert all(int(g[1:]) >= begins.next_ordinal for g in second.trained_at.keys() - back)
