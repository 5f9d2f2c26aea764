"""Held-out evaluation summed up."""

import math

import pytest

from rollart_core.scheduling.evaluate import summarise, within
from rollart_core.types import Failure, FailureKind, Task, Ticket, Trajectory


def played(number, task, env="lake", *, score=1.0, success=True, failed=False):
    ticket = Ticket(f"t{number}", Task(env, "test", task, seed=task), f"g{number}", 0)
    if failed:
        failure = Failure(FailureKind.SANDBOX, "sandbox.exec", "gone")
        return Trajectory(ticket, "failed", failure=failure)
    return Trajectory(ticket, "finished", reward=score, score=score, success=success)


def test_attempts_at_one_task_are_one_task_more_often():
    won = {0: True, 1: False}
    once = summarise([played(i, task, success=won[task]) for i, task in enumerate((0, 1))])
    four = [played(i, task, success=won[task]) for i, task in enumerate((0, 1) * 4)]
    often = summarise(four)
    assert (once.success.n, often.success.n, often.success.mean) == (2, 8, 0.5)
    assert often.success.low == pytest.approx(once.success.low)  # eight alike say no more than two


def test_scores_are_paired_by_task():
    attempts = [(0, 1.0), (1, 0.0), (0, 0.0), (1, 0.0)]
    found = summarise(
        [*(played(i, t, score=s) for i, (t, s) in enumerate(attempts)), played(9, 2, failed=True)]
    )
    assert found.scores[:2] == (0.5, 0.0)
    assert math.isnan(found.scores[2])
    assert (found.num_failed, found.score.mean, found.score.n) == (1, 0.25, 4)


def test_an_environment_that_never_says_success_is_in_no_share_of_it():
    lakes = [played(i, i, success=i < 3) for i in range(4)]
    mute = [played(10 + i, i, "mute", success=None) for i in range(4)]
    found = summarise([*lakes, *mute])
    assert (found.success.mean, found.success.n, found.score.n) == (0.75, 4, 8)
    assert (found.by_env["mute"].success.n, found.by_env["mute"].score.n) == (0, 4)


def test_intervals_do_not_exceed_the_possible_scores():
    ends = [played(n, n, env, score=float(n > 0)) for n in range(9) for env in ("lake", "shop")]
    result = summarise(ends)
    assert result.score.high > 1.0
    clipped = within(result, {"lake": (0.0, 1.0), "shop": (-1.0, 0.9)})
    assert (clipped.score.mean, clipped.score.high) == (result.score.mean, 1.0)
    assert clipped.score.low == result.score.low > 0.0
    assert clipped.by_env["shop"].score.high == 0.9
    assert within(result, {"lake": None, "shop": (0.0, 1.0)}).score == result.score
