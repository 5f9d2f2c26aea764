"""Held-out evaluation: success and score of the current policy, with confidence intervals.

Takes: tasks and a way to run an episode. Gives: an :class:`EvaluationResult`. Never: trains, or
counts a failed episode as unsuccessful (it is retried, then excluded and counted as failed).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from rollart_core.scheduling.failure_rate import RetryBudget
from rollart_core.store.estimates import (
    Clusters,
    Estimate,
    by_task,
    clustered_mean,
    clustered_share,
    named_means,
)
from rollart_core.types import Task, Ticket, Trajectory

ClusterOf: TypeAlias = Callable[[Task], str | None]
"""Returns the name of the cluster of a task in its environment; None if it is in no cluster."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The results of one evaluation."""

    success: Estimate
    score: Estimate
    num_failed: int
    """Number of episodes that failed despite retries; not part of the estimates."""
    num_truncated: int
    mean_turns: float
    mean_loss_tokens: float
    scores: tuple[float, ...] = ()
    """The mean score of each task's attempts, in the order of the tasks; NaN if no attempt ended.
    For paired comparisons."""
    successes: tuple[float, ...] = ()
    """The same for success; NaN also if the environment never reports it."""
    clusters: tuple[object, ...] = ()
    """The cluster of each of these tasks; the task itself if it is in no cluster."""
    rewards: Mapping[str, Estimate] = field(default_factory=dict)
    """The mean of ``reward``, and of each of its components in the episodes that have it."""
    by_env: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """The result of each environment, if there are several."""

    def as_dict(self) -> dict[str, object]:
        """Return the values that a report shows."""
        return {
            "success": self.success.as_dict(),
            "score": self.score.as_dict(),
            "rewards": {name: mean.as_dict() for name, mean in self.rewards.items()},
            "failed": self.num_failed,
            "truncated": self.num_truncated,
            "mean_turns": self.mean_turns,
            "mean_loss_tokens": self.mean_loss_tokens,
        }


async def evaluate(
    tasks: Sequence[Task],
    run: Callable[[Ticket], Awaitable[Trajectory]],
    *,
    name: str,
    max_concurrent: int,
    max_retries: int = 2,
    places: AbstractAsyncContextManager[object] | None = None,
    cluster_of: ClusterOf | None = None,
) -> EvaluationResult:
    """Run one episode of every task and summarise them.

    Args:
        tasks: The tasks to run.
        run: Executes one attempt.
        name: Part of the ticket ids, so that different evaluations draw different samples.
        max_concurrent: Maximum number of concurrent episodes.
        max_retries: Retries per task; replays after infrastructure failures do not count.
        places: A context manager that each episode enters, instead of the limit ``max_concurrent``.
            If None, the limit applies.
        cluster_of: Returns the cluster of a task, for the intervals. If None, each task is its own
            cluster.
    """
    gate = places or asyncio.Semaphore(max_concurrent)

    async def one(number: int, task: Task) -> Trajectory:
        ticket = Ticket(f"{name}-{number:06d}.0", task, f"{name}-{number:06d}", 0)
        async with gate:
            trajectory, budget = await run(ticket), RetryBudget()
            while trajectory.failure and budget.take(trajectory.failure, max_retries):
                ticket = replace(ticket, attempt=ticket.attempt + 1)
                trajectory = await run(ticket)
        return trajectory

    jobs = [asyncio.ensure_future(one(i, task)) for i, task in enumerate(tasks)]
    try:
        return summarise(await asyncio.gather(*jobs), cluster_of)
    finally:
        for job in jobs:
            job.cancel()


def within(
    result: EvaluationResult, ranges: Mapping[str, tuple[float, float] | None]
) -> EvaluationResult:
    """Return a result whose score intervals are clipped to the possible scores.

    Args:
        result: The result.
        ranges: Environment -> the smallest and largest return of an episode; None if unknown.
    """
    known = [one or (-math.inf, math.inf) for one in ranges.values()]
    low, high = min(lowest for lowest, _ in known), max(highest for _, highest in known)
    score = result.score
    if math.isfinite(score.low):  # otherwise there is no interval
        score = replace(score, low=max(score.low, low), high=min(score.high, high))
    by_env = {name: within(one, {name: ranges[name]}) for name, one in result.by_env.items()}
    return replace(result, score=score, by_env=by_env)


def paired_gain(
    before: EvaluationResult, after: EvaluationResult, of: Literal["scores", "successes"] = "scores"
) -> Estimate:
    """Return the mean over tasks of after minus before, paired by task and clustered.

    Args:
        before: The first evaluation.
        after: The second evaluation, of the same tasks in the same order.
        of: The values to compare. A task without a value in one of them is excluded.
    """
    pairs = enumerate(zip(getattr(before, of), getattr(after, of), strict=True))
    gains: dict[object, list[float]]
    gains = {i: [b - a] for i, (a, b) in pairs if not math.isnan(b - a)}
    return clustered_mean(gains, dict(enumerate(after.clusters)))


def summarise(
    trajectories: Sequence[Trajectory], cluster_of: ClusterOf | None = None
) -> EvaluationResult:
    """Summarise trajectories; failed ones only count as failed.

    Success covers only the environments that report it, as in a table of evaluations.

    Args:
        trajectories: One attempt each.
        cluster_of: Returns the cluster of a task, for the intervals. If None, each task is its own
            cluster.
    """
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.ticket.task.env_id, []).append(trajectory)
    of_each = {
        name: summarise(some, cluster_of) for name, some in by_env.items() if len(by_env) > 1
    }
    good = [t for t in trajectories if t.failure is None]
    reporting = {t.ticket.task.env_id for t in good if t.success is not None}
    judged = [t for t in good if t.ticket.task.env_id in reporting]
    wins = by_task(judged, _task, lambda t: float(bool(t.success)))
    scores = by_task(good, _task, lambda t: t.score or 0.0)
    tasks = dict.fromkeys(map(_task, trajectories))
    clusters = clusters_of((t.ticket.task for t in trajectories), cluster_of)
    return EvaluationResult(
        success=clustered_share(wins, clusters),
        score=clustered_mean(scores, clusters),
        num_failed=len(trajectories) - len(good),
        num_truncated=sum(t.status == "truncated" for t in good),
        mean_turns=_mean([float(len(t.turns)) for t in good]),
        mean_loss_tokens=_mean([float(t.num_loss_tokens) for t in good]),
        scores=tuple(_mean(scores.get(task, [])) for task in tasks),
        successes=tuple(_mean(wins.get(task, [])) for task in tasks),
        clusters=tuple(clusters.get(task, task) for task in tasks),
        rewards=named_means(good, _task, rewards_of, clusters),
        by_env=of_each,
    )


def rewards_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the reward of a finished trajectory, under ``reward``, and its components."""
    return {"reward": trajectory.reward or 0.0, **trajectory.reward_components}


def clusters_of(tasks: Iterable[Task], cluster_of: ClusterOf | None) -> Clusters:
    """Return the cluster of each task that is in one; environments never share a cluster.

    Args:
        tasks: Tasks of any environments.
        cluster_of: Returns the cluster of a task. If None, no task is in a cluster.
    """
    if cluster_of is None:
        return {}
    named = ((task, cluster_of(task)) for task in tasks)
    return {_key(task): (task.env_id, name) for task, name in named if name is not None}


def _task(trajectory: Trajectory) -> object:
    return _key(trajectory.ticket.task)


def _key(task: Task) -> tuple[str, str, int]:
    return task.env_id, task.split, task.index


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
