"""The audit accounts for every ticket, and each broken promise is named."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.audited_runs import END, Run, failed, finished, ticket

from rollart_core.scheduling.events import AbortEpisode, DropGroup, LoseTicket
from rollart_core.types import Failure, FailureKind, Trajectory, Turn


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.journal.close()


def test_a_sound_run_is_accounted_for(run: Run) -> None:
    run.journal.dispatched(ticket(0, 1), 0)
    run.journal.trajectory(failed(ticket(0, 1)))
    members = [
        run.finish(ticket(0, 0), num_tokens=4),
        run.finish(ticket(0, 1, 1), version=1, num_tokens=8, num_turns=3),
    ]
    run.train(0, run.finish(ticket(4), num_tokens=6, num_turns=2))
    run.train(1, *members)
    run.finish(ticket(1), num_tokens=60, num_turns=8)
    run.journal.decided(DropGroup("g0000001", "too_stale", requeued=True))
    run.journal.dispatched(ticket(2), 1)
    run.journal.decided(AbortEpisode("g0000002.0", "stopped"))
    run.journal.dispatched(ticket(3), 1)
    run.journal.trajectory(failed(ticket(3)))
    run.journal.decided(LoseTicket("g0000003.0", "sandbox: gone"))
    run.journal.decided(END)
    report = run.audit()
    assert report.ok
    assert (report.num_tickets, report.trained, report.retried, report.open) == (6, 3, 1, 0)
    assert (report.dropped, report.aborted) == ({"too_stale": 1}, {"stopped": 1})
    assert (report.lost, report.failures) == ({"sandbox": 1}, {"sandbox": 2})
    assert (report.max_staleness, report.staleness) == (1, {0: 2, 1: 1})
    bias = report.length_bias
    assert (bias["finished_tokens_mean"], bias["trained_tokens_mean"]) == (19.5, 6.0)
    assert (bias["finished_turns_mean"], bias["trained_turns_mean"]) == (3.5, 2.0)
    assert report.ended == "done"
    assert report.outcomes == {
        "trained": 3,
        "rolled back": 0,
        "not trained": 1,
        "failed": 2,
        "cancelled": 0,
        "unrecorded": 1,
    }
    assert sum(report.outcomes.values()) == report.attempts
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


def test_a_sample_above_the_bound_is_named(run: Run) -> None:
    run.train(0, run.finish(ticket(0)))
    run.train(1, run.finish(ticket(1)))
    run.train(2, run.finish(ticket(2)))
    report = run.audit()
    assert report.violations == ("g0000002.0 was trained at staleness 2, above 1",)
    assert not report.ok


def test_sync_promises_no_staleness_at_all(tmp_path: Path) -> None:
    run = Run(tmp_path, mode="sync")
    run.train(0, run.finish(ticket(0)))
    run.train(1, run.finish(ticket(1), version=0))
    assert run.audit().violations == ("g0000001.0 was trained at staleness 1, above 0",)
    run.journal.close()


def test_a_ticket_trained_twice_is_named(run: Run) -> None:
    trajectory = run.finish(ticket(0))
    run.train(0, trajectory)
    run.train(1, trajectory)
    assert run.audit().violations == ("g0000000.0 was trained 2 times",)


def test_an_unaccounted_ticket_is_named_once_the_run_has_ended(run: Run) -> None:
    run.journal.dispatched(ticket(0), 0)
    report = run.audit()
    assert (report.open, report.ok, report.ended) == (1, True, None)
    run.journal.decided(END)
    assert run.audit().violations == (
        "g0000000.0 has no final state: the run has ended, but it is still running",
    )


def test_training_on_what_failed_or_was_given_up_is_named(run: Run) -> None:
    run.journal.dispatched(ticket(0), 0)
    run.journal.trajectory(failed(ticket(0)))
    run.train(0, finished(ticket(0)))
    run.train(1, run.finish(ticket(1), version=1))
    run.journal.decided(AbortEpisode("g0000001.0", "too_stale"))
    assert run.audit().violations == (
        "g0000000.0 was trained but has no finished trajectory",
        "g0000001.0 was trained but is also aborted: too_stale",
    )


def test_what_a_resume_undid_is_trained_again_once(run: Run) -> None:
    run.train(0, run.finish(ticket(0)))
    run.journal.decided(END)
    run.journal.rolled_back(0, "resumed")
    report = run.audit()
    assert (report.ok, report.open, report.trained, report.ended) == (True, 1, 0, None)
    run.train(0, run.finish(ticket(0, attempt=1)))
    report = run.audit()
    assert (report.ok, report.open, report.trained, report.rolled_back) == (True, 0, 1, 1)
    assert (report.batches, report.batches_rolled_back) == (1, 1)
    assert (report.outcomes["trained"], report.outcomes["rolled back"]) == (1, 1)
    assert report.went_back == ("to version 0: resumed",)


def test_what_a_lost_life_generated_may_not_be_trained_in_a_later_one(run: Run) -> None:
    trajectory = run.finish(ticket(0))
    run.journal.rolled_back(0, "the trainer was lost")
    run.train(0, trajectory)
    assert run.audit().violations == (
        "g0000000.0 was trained on a trajectory of versions that were rolled back before",
    )


def test_batches_and_groups_that_are_not_there_are_named(run: Run) -> None:
    run.train(1, run.finish(ticket(2), version=1))
    run.train(1, run.finish(ticket(0), version=1))
    assert run.audit().violations == (
        "batch 1 was trained 2 times",
        "batch 0 is missing",
        "1 groups were started but are not in the journal: g0000001",
    )


def test_members_that_were_not_needed_are_no_failures_and_count_as_dispatched(run: Run) -> None:
    short = run.finish(ticket(0, 0), num_tokens=4)
    run.journal.dispatched(ticket(0, 1), 0)
    run.journal.decided(AbortEpisode("g0000000.1", "redundant"))
    cancelled = Failure(FailureKind.CANCELLED, "episode", "aborted", retryable=False)
    long = Turn("see", "do", 40, 6, "stop", 0.0, 0.0, 0.0)
    run.journal.trajectory(Trajectory(ticket(0, 1), "failed", turns=(long,), failure=cancelled))
    run.train(0, short)
    run.journal.decided(END)
    report = run.audit()
    assert report.ok
    assert (report.aborted, report.failures) == ({"redundant": 1}, {})
    bias = report.length_bias
    assert (bias["dispatched_tokens_mean"], bias["trained_tokens_mean"]) == (25.0, 4.0)
