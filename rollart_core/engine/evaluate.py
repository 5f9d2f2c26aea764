"""Held-out evaluation: success and score of the policy the engines hold now, with intervals.

Takes: tasks and a way to run an episode. Gives: an :class:`EvaluationResult`. Never: trains, or
counts a failed episode as unsuccessful (it is retried, then left out and counted as failed).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rollart_core.types import Task, Ticket, Trajectory

Z_95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What the policy reached."""

    success: Estimate
    score: Estimate
    num_failed: int
    """Episodes that failed in spite of retries; not part of the estimates."""
    num_truncated: int
    mean_turns: float
    mean_loss_tokens: float
    scores: tuple[float, ...] = ()
    """One per task, in the order of the tasks; for paired comparisons."""
    by_env: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """Of each environment alone, where there are several."""

    def as_dict(self) -> dict[str, object]:
        """Return what a report shows."""
        return {
            "success": self.success.as_dict(),
            "score": self.score.as_dict(),
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
) -> EvaluationResult:
    """Run one episode of every task and sum up.

    Args:
        tasks: What to run.
        run: Executes one attempt.
        name: Part of the ticket ids, so that different evaluations draw different samples.
        max_concurrent: Most episodes at once.
        max_retries: Per task.
    """
    gate = asyncio.Semaphore(max_concurrent)

    async def one(number: int, task: Task) -> Trajectory:
        ticket = Ticket(f"{name}-{number:06d}.0", task, f"{name}-{number:06d}", 0)
        async with gate:
            trajectory = await run(ticket)
            for attempt in range(1, max_retries + 1):
                if trajectory.failure is None:
                    break
                trajectory = await run(replace(ticket, attempt=attempt))
        return trajectory

    jobs = [asyncio.ensure_future(one(i, task)) for i, task in enumerate(tasks)]
    try:
        return summarise(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()


def summarise(trajectories: Sequence[Trajectory]) -> EvaluationResult:
    """Sum up trajectories; failed ones only count as failed."""
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.ticket.task.env_id, []).append(trajectory)
    of_each = {name: summarise(some) for name, some in by_env.items() if len(by_env) > 1}
    good = [t for t in trajectories if t.failure is None]
    scores = [t.score or 0.0 for t in good]
    wins = sum(bool(t.success) for t in good)
    return EvaluationResult(
        success=wilson(wins, len(good)),
        score=mean_interval(scores),
        num_failed=len(trajectories) - len(good),
        num_truncated=sum(t.status == "truncated" for t in good),
        mean_turns=_mean([float(len(t.turns)) for t in good]),
        mean_loss_tokens=_mean([float(t.num_loss_tokens) for t in good]),
        scores=tuple(t.score if t.score is not None else math.nan for t in trajectories),
        by_env=of_each,
    )


def wilson(successes: int, n: int) -> Estimate:
    """Return a share with Wilson's 95% score interval (Wilson 1927, JASA 22:209)."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n)) / (1 + Z_95**2 / n)
    return Estimate(p, max(0.0, centre - spread), min(1.0, centre + spread), n)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return a mean with its normal 95% interval."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = sum(values) / n
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    spread = Z_95 * math.sqrt(variance / n)
    return Estimate(mean, mean - spread, mean + spread, n)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
