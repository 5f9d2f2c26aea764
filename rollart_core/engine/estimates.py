"""Means with their 95% intervals, of attempts that may be several at one task.

Takes: values, or values by task. Gives: :class:`Estimate`. Never: counts attempts at one task as if
they were independent tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

T = TypeVar("T")

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


def wilson(successes: int, n: int) -> Estimate:
    """Return a share with Wilson's 95% score interval (Wilson 1927, JASA 22:209)."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    return Estimate(p, *wilson_interval(p, n), n)


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


def by_task(
    attempts: Iterable[T], task: Callable[[T], object], value: Callable[[T], float]
) -> dict[object, list[float]]:
    """Return the values of the attempts at each task."""
    found: dict[object, list[float]] = {}
    for attempt in attempts:
        found.setdefault(task(attempt), []).append(value(attempt))
    return found


def clustered_share(by_task: Mapping[object, Sequence[float]]) -> Estimate:
    """Return the mean over tasks of each task's mean, of values from 0 to 1; ``n`` counts values.

    Wilson's score interval with the effective number of independent attempts, ``p (1 - p)`` over
    the variance of the mean between tasks (Franco et al. 2019, J. Surv. Stat. Methodol. 7:334).
    With one attempt a task it is Wilson's own; where all tasks say the same, tasks are what counts.

    Args:
        by_task: The values of each task; tasks without any are left out.
    """
    means = _means(by_task)
    n = sum(len(values) for values in by_task.values())
    if not means:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = math.fsum(means) / len(means)
    variance = math.fsum((m - p) ** 2 for m in means) / len(means) ** 2
    spread = p * (1 - p)
    effective = float(len(means)) if variance <= 0 or spread <= 0 else spread / variance
    low, high = wilson_interval(p, min(effective, float(n)))
    return Estimate(p, low, high, n)


def clustered_mean(by_task: Mapping[object, Sequence[float]]) -> Estimate:
    """Return the mean over tasks of each task's mean, with its normal 95% interval over tasks."""
    over_tasks = mean_interval(_means(by_task))
    n = sum(len(values) for values in by_task.values())
    return Estimate(over_tasks.mean, over_tasks.low, over_tasks.high, n)


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share among ``n``, which need not be whole."""
    centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n)) / (1 + Z_95**2 / n)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _means(by_task: Mapping[object, Sequence[float]]) -> list[float]:
    return [math.fsum(values) / len(values) for values in by_task.values() if values]
