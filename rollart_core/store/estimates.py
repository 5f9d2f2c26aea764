"""Means with 95% confidence intervals, also for several attempts per task.

Takes: values, or values by task, and the cluster of each task. Gives: :class:`Estimate`. Never:
counts attempts at one task, or tasks of one cluster, as independent.

Every task has the same weight in a mean, independent of its number of attempts and of the size of
its cluster. For ``N`` tasks with means ``m_i`` in ``G`` clusters, the variance of the mean ``m`` is

    G / (G - 1) * sum over clusters of (sum over its tasks of (m_i - m))**2 / N**2

(Liang and Zeger 1986, Biometrika 73:13; Cameron and Miller 2015, J. Hum. Resour. 50:317, equations
10 and 11), with Student's quantile of ``G - 1`` degrees of freedom (ibid., section VI.D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Clusters: TypeAlias = Mapping[object, object]
"""Task -> its cluster; a task that is not in the mapping is its own cluster."""

Z_95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float
    n: int
    """The number of values."""
    num_clusters: int = 0
    """The number of independent clusters; 0 if unknown."""

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields as a dict."""
        return asdict(self)


def wilson(successes: int, n: int) -> Estimate:
    """Return a share with Wilson's 95% score interval (Wilson 1927, JASA 22:209)."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    return Estimate(p, *wilson_interval(p, n), n, n)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return a mean with its normal 95% interval."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = sum(values) / n
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1, 1)
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    spread = Z_95 * math.sqrt(variance / n)
    return Estimate(mean, mean - spread, mean + spread, n, n)


def by_task(
    attempts: Iterable[T], task: Callable[[T], object], value: Callable[[T], float]
) -> dict[object, list[float]]:
    """Return the values of the attempts at each task."""
    found: dict[object, list[float]] = {}
    for attempt in attempts:
        found.setdefault(task(attempt), []).append(value(attempt))
    return found


def named_means(
    attempts: Iterable[T],
    task: Callable[[T], object],
    values: Callable[[T], Mapping[str, float]],
    clusters: Clusters | None = None,
) -> dict[str, Estimate]:
    """Return the mean of each named value over the attempts that have it."""
    found: dict[str, dict[object, list[float]]] = {}
    for attempt in attempts:
        for name, value in values(attempt).items():
            found.setdefault(name, {}).setdefault(task(attempt), []).append(value)
    return {name: clustered_mean(of_tasks, clusters) for name, of_tasks in found.items()}


def clustered_share(
    by_task: Mapping[object, Sequence[float]], clusters: Clusters | None = None
) -> Estimate:
    """Return the mean over tasks of each task's mean, of values from 0 to 1; ``n`` counts values.

    Uses Wilson's score interval with the effective number of independent attempts: ``p (1 - p)``
    over the variance of the mean between clusters, times the squared ratio of Student's quantiles
    of ``N - 1`` and ``G - 1`` degrees of freedom (Franco et al. 2019, J. Surv. Stat. Methodol.
    7:334). With one attempt per task and one task per cluster, it equals Wilson's interval. If all
    tasks have the same value, each cluster counts once.

    Args:
        by_task: The values of each task; tasks without values are ignored.
        clusters: The cluster of each task. If None, each task is its own cluster.
    """
    means, n = _means(by_task), _num_values(by_task)
    if not means:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = math.fsum(means.values()) / len(means)
    sums = _deviations(means, p, clusters or {})
    if len(sums) == 1 < len(means):
        return Estimate(p, 0.0, 1.0, n, 1)
    variance = math.fsum(s * s for s in sums) / len(means) ** 2
    spread = p * (1 - p)
    effective = float(len(sums))
    if variance > 0 and spread > 0:
        scale = _relative(len(sums), len(means))
        effective = min(spread / variance, float(n)) / scale**2
    low, high = wilson_interval(p, effective)
    return Estimate(p, low, high, n, len(sums))


def clustered_mean(
    by_task: Mapping[object, Sequence[float]], clusters: Clusters | None = None
) -> Estimate:
    """Return the mean over tasks of each task's mean, with its normal 95% interval over clusters.

    Args:
        by_task: The values of each task; tasks without values are ignored.
        clusters: The cluster of each task. If None, each task is its own cluster.
    """
    means, n = _means(by_task), _num_values(by_task)
    over_tasks = mean_interval(list(means.values()))
    if len(means) < 2:
        return Estimate(over_tasks.mean, over_tasks.low, over_tasks.high, n, len(means))
    sums = _deviations(means, over_tasks.mean, clusters or {})
    if len(sums) == 1:
        return Estimate(over_tasks.mean, -math.inf, math.inf, n, 1)
    variance = math.fsum(s * s for s in sums) * len(means) / (len(means) - 1) / len(means) ** 2
    reach = Z_95 * _relative(len(sums), len(means)) * math.sqrt(variance)
    return Estimate(over_tasks.mean, over_tasks.mean - reach, over_tasks.mean + reach, n, len(sums))


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share; ``n`` may be fractional."""
    centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n)) / (1 + Z_95**2 / n)
    # The interval contains the share itself, despite rounding errors (p = 0 or 1).
    return max(0.0, min(p, centre - spread)), min(1.0, max(p, centre + spread))


def _means(by_task: Mapping[object, Sequence[float]]) -> dict[object, float]:
    return {task: math.fsum(v) / len(v) for task, v in by_task.items() if v}


def _num_values(by_task: Mapping[object, Sequence[float]]) -> int:
    return sum(len(values) for values in by_task.values())


def _deviations(means: Mapping[object, float], mean: float, clusters: Clusters) -> list[float]:
    """Return, for each cluster, the sum of its tasks' deviations from the mean."""
    found: dict[object, float] = {}
    for task, value in means.items():
        key = ("cluster", clusters[task]) if task in clusters else ("task", task)
        found[key] = found.get(key, 0.0) + value - mean
    return list(found.values())


def _relative(num_clusters: int, num_tasks: int) -> float:
    """Return the factor by which clustering widens an interval.

    It is the square root of ``G / (G - 1)`` times Student's quantile, each divided by its value for
    the tasks. It is 1 if each task is its own cluster, so intervals without clusters are Wilson's
    and the normal one.
    """
    if num_clusters == num_tasks:
        return 1.0
    wider = num_clusters / (num_clusters - 1) / (num_tasks / (num_tasks - 1))
    return math.sqrt(wider) * t_95(num_clusters - 1) / t_95(num_tasks - 1)


def t_95(df: int) -> float:
    """Return Student's two-sided 95% quantile.

    It is exact for 1 and 2 degrees of freedom. Otherwise it is the expansion 26.7.5 of Abramowitz
    and Stegun (1964), which is less than 0.004 too small.
    """
    if df == 1:
        return math.tan(0.475 * math.pi)
    if df == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = Z_95
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )
