"""pass@k, without bias and with 95% intervals.

Takes: values by task. Gives: an :class:`Estimate` for each k. Never: counts attempts at one task as
if they were independent tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rollart_core.store.estimates import Clusters, Estimate, clustered_share


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


def pass_estimates(
    by_task: Mapping[object, Sequence[float]],
    num_attempts: int,
    clusters: Clusters | None = None,
) -> dict[int, Estimate]:
    """Return pass@k for each k of :func:`ks_of`; ``n`` counts tasks.

    Args:
        by_task: 1 for each attempt that was right, 0 for each that was not.
        num_attempts: Attempts that each task was given; one with fewer that came to an end is
            part of those k's alone that they suffice for.
        clusters: Which tasks belong together; None: none do.
    """
    found = {}
    for k in ks_of(num_attempts):
        counts = {t: (len(v), round(sum(v))) for t, v in by_task.items() if len(v) >= k}
        chances = {task: [pass_at_k(n, c, k)] for task, (n, c) in counts.items()}
        found[k] = clustered_share(chances, clusters)
    return found
