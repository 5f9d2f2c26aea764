"""The schedule of episodes that wait for their score."""

from __future__ import annotations

from typing import Any

import pytest

from rollart_core.scheduling.events import (
    AbortEpisode,
    CompleteGroup,
    DropGroup,
    EpisodeFailed,
    EpisodeFinished,
    EpisodePlayed,
    Event,
    LoseTicket,
    RunStarted,
    SchedulePolicy,
    ScoreGroup,
    StartEpisode,
    StopRequested,
    TicketExpired,
)
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Failure, FailureKind

ENV = "fake/Env-v0"
NO_SCORE = Failure(FailureKind.REWARD, "reward.score", "no verdict")
NO_TEACHER = Failure(FailureKind.INFERENCE, "teacher", "it has nothing to say")


def scheduler(**options: Any) -> Scheduler:
    defaults: dict[str, Any] = {"groups_per_batch": 1, "group_size": 2, "max_concurrent": 100}
    return Scheduler(SchedulePolicy(**(defaults | options)), TaskSource(ENV, "train", 50, 0))


def together(**options: Any) -> Scheduler:
    return scheduler(scored_together=frozenset([ENV]), max_staleness=0, **options)


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def ids(actions: list[Any]) -> list[str]:
    return [a.ticket.ticket_id for a in of(StartEpisode, actions)]


def notify(s: Scheduler, *events: Event) -> list[Any]:
    return [action for event in events for action in s.handle(event)]


def played(*names: str, attempt: int = 0) -> list[EpisodePlayed]:
    return [EpisodePlayed(f"g000000{name}", attempt) for name in names]


def finished(*names: str) -> list[EpisodeFinished]:
    return [EpisodeFinished(f"g000000{name}", 0, 0) for name in names]


def test_what_waits_for_its_score_holds_no_place() -> None:
    s = scheduler(max_concurrent=2)
    assert ids(s.handle(RunStarted())) == ["g0000000.0", "g0000000.1"]
    assert ids(notify(s, *played("0.0"))) == ["g0000001.0"]
    assert (s.snapshot().num_running, s.snapshot().num_scoring) == (2, 1)
    assert notify(s, *played("0.0")) == []
    assert ids(notify(s, *finished("0.0"))) == []
    assert (s.snapshot().num_running, s.snapshot().num_scoring) == (2, 0)


def test_admission_counts_what_waits_for_its_score() -> None:
    s = scheduler(max_staleness=1)
    assert len(ids(s.handle(RunStarted()))) == 4
    assert ids(notify(s, *played("0.0", "0.1", "1.0", "1.1"))) == []


def test_a_score_that_fails_is_retried_and_expires_like_any_attempt() -> None:
    s = scheduler(max_retries=1)
    s.handle(RunStarted())
    actions = notify(s, *played("0.0"), EpisodeFailed("g0000000.0", 0, NO_SCORE))
    assert ids(actions) == ["g0000000.0"]
    actions = notify(s, EpisodePlayed("g0000000.0", 1), TicketExpired("g0000000.0"))
    assert [type(a) for a in actions] == [AbortEpisode, LoseTicket]
    assert s.snapshot().num_scoring == 0


def test_what_is_not_needed_is_aborted_while_it_is_scored() -> None:
    s = scheduler(redundant=1, max_staleness=0)
    s.handle(RunStarted())
    actions = notify(s, *played("0.0", "0.1", "0.2"), *finished("0.2", "0.0"))
    assert [a.ticket_id for a in of(AbortEpisode, actions)] == ["g0000000.1"]
    assert of(CompleteGroup, actions) == [CompleteGroup("g0000000", (1,))]


def test_a_stop_ends_what_is_scored() -> None:
    s = scheduler()
    s.handle(RunStarted())
    actions = notify(s, *played("0.0"), StopRequested("enough"))
    assert "g0000000.0" in [a.ticket_id for a in of(AbortEpisode, actions)]
    assert s.snapshot().num_running == 0


def test_a_group_is_scored_once_all_have_played() -> None:
    s = together()
    s.handle(RunStarted())
    assert notify(s, *played("0.1")) == []
    both = ScoreGroup("g0000000", ("g0000000.0", "g0000000.1"))
    assert notify(s, *played("0.0")) == [both]
    assert of(CompleteGroup, notify(s, *finished("0.0", "0.1"))) == [CompleteGroup("g0000000")]


def test_a_group_that_lost_members_is_scored_without_them_or_dropped() -> None:
    s = together(group_size=3, min_group_size=2, max_retries=0)
    s.handle(RunStarted())
    actions = notify(s, *played("0.0", "0.1"), EpisodeFailed("g0000000.2", 0, NO_SCORE))
    assert of(ScoreGroup, actions) == [ScoreGroup("g0000000", ("g0000000.0", "g0000000.1"))]
    s = together(group_size=3, min_group_size=3, max_retries=0)
    s.handle(RunStarted())
    actions = notify(s, *played("0.0", "0.1"), EpisodeFailed("g0000000.2", 0, NO_SCORE))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "too_small")]
    assert len(of(AbortEpisode, actions)) == 2


def test_a_group_has_enough_when_enough_have_played() -> None:
    s = together(redundant=1)
    s.handle(RunStarted())
    actions = notify(s, *played("0.2", "0.0"))
    assert [a.ticket_id for a in of(AbortEpisode, actions)] == ["g0000000.1"]
    assert of(ScoreGroup, actions) == [ScoreGroup("g0000000", ("g0000000.0", "g0000000.2"))]


def test_a_group_whose_score_fails_plays_again() -> None:
    s = together(max_retries=1)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1"))
    failed = [EpisodeFailed(f"g0000000.{i}", 0, NO_SCORE) for i in range(2)]
    assert ids(notify(s, *failed)) == ["g0000000.0", "g0000000.1"]
    actions = notify(s, *played("0.0", "0.1", attempt=1))
    assert of(ScoreGroup, actions) == [ScoreGroup("g0000000", ("g0000000.0", "g0000000.1"))]


def failed(*names: str, attempt: int = 0, failure: Failure = NO_TEACHER) -> list[EpisodeFailed]:
    return [EpisodeFailed(f"g000000{name}", attempt, failure) for name in names]


def test_who_fails_after_its_siblings_have_their_scores_is_lost_for_what_it_failed_of() -> None:
    s = together(group_size=3, max_retries=5)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1", "0.2"), *finished("0.0"))
    assert notify(s, *failed("0.1")) == [
        LoseTicket("g0000000.1", "inference: it has nothing to say"),
    ]
    assert notify(s, *finished("0.2")) == [CompleteGroup("g0000000", (1,))]
    assert s.snapshot().retried == 0


@pytest.mark.parametrize("came", ["queued", "running", "played"])
def test_who_plays_again_is_lost_once_its_siblings_have_their_scores(came: str) -> None:
    s = together(groups_per_batch=2, max_concurrent=2)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1"))  # the other group takes their places
    assert ids(notify(s, *failed("0.1"))) == []
    if came != "queued":
        assert ids(notify(s, *played("1.0"))) == ["g0000000.1"]
    if came == "played":
        assert notify(s, *played("0.1", attempt=1)) == []
    actions = notify(s, *finished("0.0"))
    aborted = [a.ticket_id for a in of(AbortEpisode, actions)]
    assert aborted == ([] if came == "queued" else ["g0000000.1"])
    lost = LoseTicket("g0000000.1", "inference: it has nothing to say")
    assert of(LoseTicket, actions) == [lost]
    assert of(CompleteGroup, actions) == [CompleteGroup("g0000000", (1,))]
    assert (s.snapshot().lost, s.snapshot().aborted) == (1, 0)
    assert notify(s, *failed("0.1", attempt=1)) == []
    assert "g0000000.1" not in ids(notify(s, *played("1.1")))


def test_who_plays_again_is_scored_with_all_that_do() -> None:
    s = together(max_retries=5)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1"), *failed("0.1"))
    assert notify(s, *played("0.1", attempt=1)) == []  # the other may have its score
    assert ids(notify(s, *failed("0.0"))) == ["g0000000.0"]
    actions = notify(s, *played("0.0", attempt=1))
    assert actions == [ScoreGroup("g0000000", ("g0000000.0", "g0000000.1"))]


def test_a_group_whose_member_expires_while_it_is_scored_is_not_scored_again() -> None:
    s = together(group_size=3)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1", "0.2"))
    actions = notify(s, TicketExpired("g0000000.0"))
    assert [type(a) for a in actions] == [AbortEpisode, LoseTicket]
    actions = notify(s, *finished("0.1", "0.2"))
    assert actions == [CompleteGroup("g0000000", (0,))]


def test_a_group_that_is_being_scored_and_becomes_too_small_is_dropped_at_once() -> None:
    s = together(group_size=3, min_group_size=3)
    s.handle(RunStarted())
    notify(s, *played("0.0", "0.1", "0.2"), *finished("0.1"))
    actions = notify(s, *failed("0.0"))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "too_small")]
    assert [a.ticket_id for a in of(AbortEpisode, actions)] == ["g0000000.2"]


@pytest.mark.parametrize("requeues", [False, True])
def test_the_task_of_a_group_too_small_to_be_scored_comes_again(requeues: bool) -> None:
    s = together(min_group_size=2, max_retries=0, requeues_small=requeues)
    (first, _) = of(StartEpisode, s.handle(RunStarted()))
    actions = notify(s, *played("0.0"), *failed("0.1"))
    assert of(DropGroup, actions) == [DropGroup("g0000000", "too_small", requeues)]
    assert (of(StartEpisode, actions)[0].ticket.task == first.ticket.task) == requeues
