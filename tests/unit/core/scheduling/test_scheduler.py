"""The schedule, event by event."""

import pytest

from rollart_core.scheduling.events import (
    AbortEpisode,
    BatchTrained,
    CompleteGroup,
    DropGroup,
    EpisodeFailed,
    EpisodeFinished,
    GroupFiltered,
    GroupKept,
    LoseTicket,
    ReturningGroup,
    RunStarted,
    SchedulePolicy,
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
from rollart_core.types import INFRASTRUCTURE_KINDS, Failure, FailureKind, Task

BROKEN = Failure(FailureKind.ENVIRONMENT, "env.step", "boom")
FATAL = Failure(FailureKind.SANDBOX, "sandbox.exec", "gone", retryable=False)
CANCELLED = Failure(FailureKind.CANCELLED, "episode", "stopped", retryable=False)


def scheduler(**options) -> Scheduler:
    defaults = {"groups_per_batch": 1, "group_size": 1, "max_concurrent": 100}
    policy = SchedulePolicy(**(defaults | options))
    return Scheduler(policy, TaskSource("fake/Env-v0", "train", 50, 0))


def started(actions) -> list[str]:
    return [a.ticket.ticket_id for a in actions if isinstance(a, StartEpisode)]


def of(kind, actions) -> list:
    return [a for a in actions if isinstance(a, kind)]


def finish(s: Scheduler, group: str, size: int = 1, version: int = 0) -> list:
    """Finish all members of a group and let the filter keep it."""
    actions = [
        a for i in range(size) for a in s.handle(EpisodeFinished(f"{group}.{i}", 0, version))
    ]
    return actions + s.handle(GroupKept(group))


def test_admission_is_bounded_by_staleness() -> None:
    s = scheduler(groups_per_batch=2, group_size=3, max_staleness=2)
    assert len(started(s.handle(RunStarted()))) == (2 + 1) * 2 * 3


def test_members_share_the_task_and_concurrency_is_respected() -> None:
    s = scheduler(group_size=4, max_concurrent=6, max_staleness=1)
    starts = of(StartEpisode, s.handle(RunStarted()))
    assert [a.ticket.ticket_id for a in starts] == [
        *(f"g0000000.{i}" for i in range(4)),
        *(f"g0000001.{i}" for i in range(2)),
    ]
    assert len({a.ticket.task for a in starts[:4]}) == 1
    assert starts[3].ticket.task != starts[4].ticket.task
    assert started(s.handle(EpisodeFinished("g0000000.1", 0, 0))) == ["g0000001.2"]


def test_a_batch_is_taken_when_enough_groups_are_kept() -> None:
    s = scheduler(groups_per_batch=2, max_staleness=1)
    s.handle(RunStarted())
    finish(s, "g0000000")
    assert of(CompleteGroup, s.handle(EpisodeFinished("g0000001.0", 0, 0)))
    assert s.handle(GroupKept("g0000001")) == [TrainBatch(("g0000000", "g0000001"), 0)]
    assert s.snapshot().trained == 2


def test_waits_for_a_straggler_the_next_batch_would_leave_too_stale() -> None:
    s = scheduler(groups_per_batch=2, max_staleness=1)
    s.handle(RunStarted())
    finish(s, "g0000000")
    finish(s, "g0000001")
    s.handle(BatchTrained(1))
    assert started(s.handle(WeightsLoaded(1))) == ["g0000004.0", "g0000005.0"]
    # g2 and g3 began at version 0: batch 1 is the last that may hold them.
    finish(s, "g0000004", version=1)
    assert not of(TrainBatch, finish(s, "g0000005", version=1))
    assert not of(TrainBatch, finish(s, "g0000002"))
    assert of(TrainBatch, finish(s, "g0000003")) == [TrainBatch(("g0000002", "g0000003"), 1)]


def test_drop_does_not_wait_and_requeues_the_task() -> None:
    s = scheduler(groups_per_batch=2, max_staleness=1, on_stale="drop")
    tasks = {a.ticket.group_id: a.ticket.task for a in of(StartEpisode, s.handle(RunStarted()))}
    finish(s, "g0000000")
    finish(s, "g0000001")
    s.handle(BatchTrained(1))
    s.handle(WeightsLoaded(1))
    finish(s, "g0000004", version=1)
    actions = finish(s, "g0000005", version=1)
    assert of(TrainBatch, actions) == [TrainBatch(("g0000004", "g0000005"), 1)]
    assert of(AbortEpisode, actions) == [
        AbortEpisode("g0000003.0", "too_stale"),
        AbortEpisode("g0000002.0", "too_stale"),
    ]
    assert {a.group_id for a in of(DropGroup, actions)} == {"g0000002", "g0000003"}
    fresh = of(StartEpisode, actions)
    assert {a.ticket.task for a in fresh} == {tasks["g0000002"], tasks["g0000003"]}
    assert s.snapshot().requeued == 2


def test_sync_starts_nothing_while_training() -> None:
    s = scheduler(groups_per_batch=2, mode="sync", max_staleness=3)
    assert len(started(s.handle(RunStarted()))) == 2
    finish(s, "g0000001")
    actions = finish(s, "g0000000")
    assert of(TrainBatch, actions)
    assert not started(actions)
    assert not started(s.handle(BatchTrained(1)))
    assert started(s.handle(WeightsLoaded(1))) == ["g0000002.0", "g0000003.0"]


def test_slow_engines_hold_admission_back() -> None:
    s = scheduler(max_staleness=1)
    s.handle(RunStarted())
    finish(s, "g0000000")
    # Engines still hold version 0: what begins now may be consumed at 1 at the latest, and g1 is.
    assert not started(s.handle(BatchTrained(1)))
    starts = of(StartEpisode, s.handle(WeightsLoaded(1)))
    assert [a.start_version for a in starts] == [1]


def test_failed_member_is_retried_with_the_same_ticket_first() -> None:
    s = scheduler(group_size=3, max_concurrent=2, max_retries=1, max_staleness=0)
    s.handle(RunStarted())
    (retry,) = of(StartEpisode, s.handle(EpisodeFailed("g0000000.0", 0, BROKEN)))
    assert (retry.ticket.ticket_id, retry.ticket.attempt) == ("g0000000.0", 1)
    actions = s.handle(EpisodeFailed("g0000000.0", 1, BROKEN))
    assert of(LoseTicket, actions)[0].ticket_id == "g0000000.0"
    assert started(actions) == ["g0000000.2"]
    assert s.snapshot().failed == {FailureKind.ENVIRONMENT: 2}


def test_a_retry_raises_the_deadline_of_its_group() -> None:
    s = scheduler(groups_per_batch=1, max_staleness=1)
    s.handle(RunStarted())
    finish(s, "g0000000")
    s.handle(BatchTrained(1))
    s.handle(WeightsLoaded(1))
    s.handle(EpisodeFailed("g0000001.0", 0, BROKEN))  # begins again at version 1
    assert of(TrainBatch, finish(s, "g0000002", version=1)) == [TrainBatch(("g0000002",), 1)]


def test_the_earliest_deadline_is_trained_first() -> None:
    s = scheduler(groups_per_batch=1, max_staleness=2)
    s.handle(RunStarted())
    finish(s, "g0000000")
    s.handle(BatchTrained(1))
    s.handle(WeightsLoaded(1))
    finish(s, "g0000003", version=1)  # taken, and while it trains:
    s.handle(EpisodeFailed("g0000001.0", 0, BROKEN))  # its retry begins at version 1
    s.handle(EpisodeFinished("g0000001.0", 1, 1))
    s.handle(GroupKept("g0000001"))
    finish(s, "g0000002")
    assert of(TrainBatch, s.handle(BatchTrained(2))) == [TrainBatch(("g0000002",), 2)]


def test_group_with_too_few_members_is_dropped_and_replaced() -> None:
    s = scheduler(group_size=3, min_group_size=2, max_staleness=0)
    s.handle(RunStarted())
    s.handle(EpisodeFailed("g0000000.0", 0, FATAL))
    s.handle(EpisodeFailed("g0000000.1", 0, CANCELLED))
    actions = s.handle(EpisodeFinished("g0000000.2", 0, 0))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "too_small")]
    assert started(actions) == [f"g0000001.{i}" for i in range(3)]
    s.handle(EpisodeFailed("g0000001.1", 0, FATAL))
    s.handle(EpisodeFinished("g0000001.0", 0, 0))
    actions = s.handle(EpisodeFinished("g0000001.2", 0, 0))
    assert actions == [CompleteGroup("g0000001", (1,))]


def test_redundant_members_are_aborted_once_enough_have_finished() -> None:
    s = scheduler(group_size=2, redundant=2, max_concurrent=3, max_retries=1, max_staleness=0)
    assert started(s.handle(RunStarted())) == [f"g0000000.{i}" for i in range(3)]
    assert started(s.handle(EpisodeFailed("g0000000.1", 0, BROKEN))) == ["g0000000.1"]
    assert started(s.handle(EpisodeFinished("g0000000.2", 0, 0))) == ["g0000000.3"]
    actions = s.handle(EpisodeFinished("g0000000.3", 0, 0))
    assert actions == [
        AbortEpisode("g0000000.0", "redundant"),
        AbortEpisode("g0000000.1", "redundant"),
        CompleteGroup("g0000000", (0, 1)),
    ]
    counts = s.snapshot()
    assert (counts.redundant, counts.lost, counts.aborted) == (2, 0, 2)
    assert s.handle(EpisodeFinished("g0000000.0", 0, 0)) == []  # it ended just then
    assert of(TrainBatch, s.handle(GroupKept("g0000000"))) == [TrainBatch(("g0000000",), 0)]


def test_a_redundant_member_that_never_began_is_not_aborted() -> None:
    s = scheduler(group_size=1, redundant=2, max_concurrent=2, max_retries=1, max_staleness=0)
    s.handle(RunStarted())
    actions = s.handle(EpisodeFinished("g0000000.0", 0, 0))
    assert actions == [AbortEpisode("g0000000.1", "redundant"), CompleteGroup("g0000000", (1, 2))]
    assert s.snapshot().redundant == 2


def test_redundant_members_stand_in_for_those_that_fail() -> None:
    s = scheduler(group_size=2, redundant=1, min_group_size=2, max_staleness=0)
    s.handle(RunStarted())
    s.handle(EpisodeFailed("g0000000.0", 0, FATAL))
    s.handle(EpisodeFinished("g0000000.1", 0, 0))
    assert s.handle(EpisodeFinished("g0000000.2", 0, 0)) == [CompleteGroup("g0000000", (0,))]


def test_filtered_group_is_replaced() -> None:
    s = scheduler(max_staleness=0)
    s.handle(RunStarted())
    s.handle(EpisodeFinished("g0000000.0", 0, 0))
    actions = s.handle(GroupFiltered("g0000000"))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "filtered")]
    assert started(actions) == ["g0000001.0"]
    assert not s.handle(GroupKept("g0000000"))


def test_late_answers_are_ignored() -> None:
    s = scheduler(group_size=2, max_staleness=0)
    s.handle(RunStarted())
    s.handle(EpisodeFailed("g0000000.0", 0, BROKEN))
    before = s.snapshot()
    late = [
        EpisodeFinished("g0000000.0", 0, 0),
        EpisodeFailed("g0000000.0", 0, BROKEN),
        EpisodeFinished("g0000099.0", 0, 0),
        TicketExpired("g0000099.0"),
        GroupFiltered("g0000000"),
    ]
    assert [a for e in late for a in s.handle(e)] == []
    assert s.snapshot() == before


def test_expired_ticket_is_aborted_and_lost() -> None:
    s = scheduler(group_size=2, max_staleness=0)
    s.handle(RunStarted())
    actions = s.handle(TicketExpired("g0000000.1"))
    assert [type(a) for a in actions] == [AbortEpisode, LoseTicket]
    assert s.handle(EpisodeFinished("g0000000.0", 0, 0)) == [CompleteGroup("g0000000", (1,))]


def test_too_many_failures_stop_the_run_with_the_reason() -> None:
    s = scheduler(failure_window=4, max_failure_rate=0.5, max_retries=9, max_staleness=3)
    s.handle(RunStarted())
    s.handle(EpisodeFinished("g0000000.0", 0, 0))
    for attempt in range(2):
        assert not of(StopRun, s.handle(EpisodeFailed("g0000001.0", attempt, BROKEN)))
    s.handle(EpisodeFailed("g0000002.0", 0, CANCELLED))
    (stop,) = of(StopRun, s.handle(EpisodeFailed("g0000001.0", 2, BROKEN)))
    assert stop.kind == "failures"
    assert stop.reason == (
        "75% of the last 4 attempts failed (limit 50%); most often, 3 times, environment: boom"
    )


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_of_failure_of_an_episode_counts(kind: FailureKind) -> None:
    s = scheduler(failure_window=3, max_failure_rate=0.9, max_retries=0, max_staleness=9)
    s.handle(RunStarted())
    failure = Failure(kind, "there", "gone", retryable=False)
    ends = [s.handle(EpisodeFailed(f"g000000{i}.0", 0, failure)) for i in range(3)]
    left_out = {FailureKind.CANCELLED, *INFRASTRUCTURE_KINDS}
    assert bool(of(StopRun, ends[-1])) == (kind not in left_out)


@pytest.mark.parametrize("kind", sorted(INFRASTRUCTURE_KINDS))
def test_losses_of_infrastructure_neither_stop_a_run_nor_use_the_budget(kind: FailureKind) -> None:
    s = scheduler(failure_window=4, max_failure_rate=0.5, max_retries=1, max_staleness=3)
    s.handle(RunStarted())
    lost = Failure(kind, "env.step", "the env process is gone")
    for attempt in range(MAX_REPLAYS):
        (start,) = of(StartEpisode, s.handle(EpisodeFailed("g0000000.0", attempt, lost)))
        assert start.ticket.attempt == attempt + 1
    (start,) = of(StartEpisode, s.handle(EpisodeFailed("g0000000.0", MAX_REPLAYS, BROKEN)))
    assert of(LoseTicket, s.handle(EpisodeFailed("g0000000.0", MAX_REPLAYS + 1, lost)))
    assert s.snapshot().failed == {kind: MAX_REPLAYS + 1, FailureKind.ENVIRONMENT: 1}


def test_a_ticket_whose_deadline_passes_counts_as_a_failure() -> None:
    s = scheduler(failure_window=2, max_failure_rate=0.9, max_staleness=9)
    s.handle(RunStarted())
    s.handle(TicketExpired("g0000000.0"))
    (stop,) = of(StopRun, s.handle(TicketExpired("g0000001.0")))
    assert "timeout: the deadline over all attempts passed" in stop.reason


def test_no_more_is_admitted_than_the_last_batches_need_and_then_it_is_done() -> None:
    s = scheduler(max_staleness=5, num_batches=2)
    assert len(started(s.handle(RunStarted()))) == 2
    finish(s, "g0000000")
    finish(s, "g0000001")
    assert of(TrainBatch, s.handle(BatchTrained(1)))
    assert s.handle(BatchTrained(2)) == [StopRun("done", "done")]
    assert s.handle(StopRequested("again")) == []


def test_stop_aborts_what_runs_and_waits_for_the_batch_in_training() -> None:
    s = scheduler(max_staleness=1)
    s.handle(RunStarted())
    finish(s, "g0000000")
    assert s.handle(StopRequested("Ctrl-C")) == [
        AbortEpisode("g0000001.0", "stopped"),
        DropGroup("g0000001", "stopped"),
    ]
    assert s.handle(BatchTrained(1)) == [StopRun("Ctrl-C", "requested")]


def test_resume_goes_on_with_fresh_numbers() -> None:
    s = scheduler(max_staleness=0)
    (start,) = s.handle(RunStarted(policy_version=7, next_ordinal=40))
    assert start.ticket.ticket_id == "g0000040.0"
    assert start.start_version == 7
    assert of(TrainBatch, finish(s, "g0000040", version=7)) == [TrainBatch(("g0000040",), 7)]


def test_groups_of_an_earlier_life_come_back_first_and_as_themselves() -> None:
    task = Task("fake/Env-v0", "train", 33, 1)
    back = (ReturningGroup("g0000005", 5, task, (3, 1)), ReturningGroup("g0000007", 7, task, (1,)))
    s = scheduler(group_size=2, max_staleness=2, max_retries=1)
    starts = of(StartEpisode, s.handle(RunStarted(4, 40, back)))
    assert [(a.ticket.ticket_id, a.ticket.attempt) for a in starts] == [
        ("g0000005.0", 3),
        ("g0000005.1", 1),
        ("g0000007.0", 1),
        ("g0000007.1", 0),
        ("g0000040.0", 0),
        ("g0000040.1", 0),
    ]
    assert {a.ticket.task for a in starts[:4]} == {task}
    assert s.snapshot().returned == 2
    # Retries are counted anew: an attempt that a kill cut off was no failure.
    assert started(s.handle(EpisodeFailed("g0000005.0", 3, BROKEN))) == ["g0000005.0"]
    assert of(LoseTicket, s.handle(EpisodeFailed("g0000005.0", 4, BROKEN)))


def test_a_stop_drops_groups_that_had_not_come_back_yet() -> None:
    task = Task("fake/Env-v0", "train", 33, 1)
    back = tuple(ReturningGroup(f"g000000{i}", i, task, (1,)) for i in range(3))
    s = scheduler(max_staleness=0)
    assert started(s.handle(RunStarted(4, 40, back))) == ["g0000000.0"]
    dropped = of(DropGroup, s.handle(StopRequested("Ctrl-C")))
    assert [a.group_id for a in dropped] == ["g0000000", "g0000001", "g0000002"]
    assert {a.reason for a in dropped} == {"stopped"}


def test_an_environment_that_always_fails_is_seen_among_healthy_ones() -> None:
    mix = Mix()
    policy = SchedulePolicy(1, 1, 100, failure_window=4, max_failure_rate=0.5, max_staleness=40)
    s = Scheduler(policy, mix)
    tickets = [a.ticket for a in of(StartEpisode, s.handle(RunStarted()))]
    stops = []
    for ticket in tickets:
        bad = ticket.task.env_id == "bad/Env-v0"
        event = (
            EpisodeFailed(ticket.ticket_id, 0, FATAL)
            if bad
            else EpisodeFinished(ticket.ticket_id, 0, 0)
        )
        stops += of(StopRun, s.handle(event))
    assert [stop.reason for stop in stops] == [
        "100% of the last 4 attempts in bad/Env-v0 failed (limit 50%); "
        "most often, 4 times, sandbox: gone"
    ]


class Mix:
    """Every eighth task is of an environment that will fail."""

    def __init__(self) -> None:
        self.n = 0

    def next(self) -> Task:
        self.n += 1
        return Task("bad/Env-v0" if self.n % 8 == 0 else "good/Env-v0", "train", self.n, 0)

    def requeue(self, task: Task) -> None:
        raise AssertionError(task)


def test_tokens_older_than_the_start_are_dropped_not_trained() -> None:
    s = scheduler(max_staleness=0)
    s.handle(RunStarted(policy_version=3))
    actions = s.handle(EpisodeFinished("g0000000.0", 0, 2)) + s.handle(GroupKept("g0000000"))
    assert not of(TrainBatch, actions)
    assert DropGroup("g0000000", "too_stale", requeued=True) in actions
    assert started(actions) == ["g0000001.0"]


def test_a_policy_that_can_never_complete_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="min_group_size 3 is above group_size 2"):
        SchedulePolicy(groups_per_batch=1, group_size=2, max_concurrent=1, min_group_size=3)


def test_equal_groups_are_replaced_until_too_many_come_in_a_row() -> None:
    s = scheduler(max_staleness=0, max_equal_groups=2)
    s.handle(RunStarted())

    def equal(group: str, version: int = 0) -> list:
        s.handle(EpisodeFinished(f"{group}.0", 0, version))
        return s.handle(GroupFiltered(group, "equal"))

    actions = equal("g0000000")
    assert of(DropGroup, actions) == [DropGroup("g0000000", "equal")]
    assert started(actions) == ["g0000001.0"]
    finish(s, "g0000001")  # one that is not: the count begins anew
    s.handle(BatchTrained(1))
    s.handle(WeightsLoaded(1))
    assert not of(StopRun, equal("g0000002", 1))
    (stop,) = of(StopRun, equal("g0000003", 1))
    assert stop.kind == "failures"
    assert "2 groups in a row were all equal" in stop.reason
    assert s.snapshot().dropped == {"equal": 3}


def test_the_task_of_a_small_group_comes_again_where_it_is_to() -> None:
    s = scheduler(group_size=2, min_group_size=2, max_staleness=0, requeues_small=True)
    first = of(StartEpisode, s.handle(RunStarted()))[0].ticket.task
    s.handle(EpisodeFailed("g0000000.0", 0, FATAL))
    actions = s.handle(EpisodeFinished("g0000000.1", 0, 0))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "too_small", True)]
    assert [a.ticket.task for a in of(StartEpisode, actions)] == [first, first]
