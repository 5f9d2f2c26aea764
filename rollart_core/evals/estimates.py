"""What evaluated episodes say: means clustered by task, and pass@k, each with a 95% interval.

Takes: values by task. Gives: :class:`rollart_core.engine.evaluate.Estimate`. Never: counts attempts
at one task as if they were independent tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rollart_core.engine.evaluate import Z_95, Estimate, mean_interval


def pass_at_k(num_attempts: int, num_right: int, k: int) -> float:
    """Return the chance that one of ``k`` attempts is right, without bias.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ValueError: When there are fewer than ``k`` attempts, or more right ones than attempts.
    """
    if not 1 <= k <= num_attempts or not 0 <= num_right <= num_attempts:
        raise ValueError(f"pass@{k} of {num_right} right in {num_attempts} attempts")
    wrong = math.comb(num_attempts - num_right, k)
    return float(1 - Fraction(wrong, math.comb(num_attempts, k)))


def ks_of(num_attempts: int) -> tuple[int, ...]:
    """Return the k's that are reported: powers of two up to the attempts, and all attempts."""
    powers = (2**i for i in range(num_attempts.bit_length()))
    return tuple(sorted({k for k in powers if k <= num_attempts} | {num_attempts}))


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


def pass_estimates(
    by_task: Mapping[object, Sequence[float]], num_attempts: int
) -> dict[int, Estimate]:
    """Return pass@k for each k of :func:`ks_of`; ``n`` counts tasks.

    Args:
        by_task: 1 for each attempt that was right, 0 for each that was not.
        num_attempts: Attempts that each task was given; one with fewer that came to an end is
            part of those k's alone that they suffice for.
    """
    found = {}
    for k in ks_of(num_attempts):
        counts = [(len(v), round(sum(v))) for v in by_task.values() if len(v) >= k]
        found[k] = clustered_share({i: [pass_at_k(n, c, k)] for i, (n, c) in enumerate(counts)})
    return found


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share among ``n``, which need not be whole."""
    centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n)) / (1 + Z_95**2 / n)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _means(by_task: Mapping[object, Sequence[float]]) -> list[float]:
    return [math.fsum(values) / len(values) for values in by_task.values() if values]
