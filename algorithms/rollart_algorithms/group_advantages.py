"""How members of a group compare with each other: baselines and normalisation.

Takes: the returns of the members that a group has; failed ones are not among them. Gives: their
advantages. Never: counts a member that is missing.

With ``M`` members and returns ``R_i``:

    group_mean      A_i = R_i - mean(R)                      arXiv:2402.03300 (GRPO), section 4.1.2
    leave_one_out   A_i = R_i - sum_{j != i} R_j / (M - 1)   arXiv:2402.14740 (RLOO)
    / group_std     of the members                           arXiv:2402.03300, section 4.1.2
    / batch_std     of all returns of the batch              arXiv:2508.08221 (Lite PPO)

A standard deviation counts as at least ``std_floor``. ``batch_std`` is that of the returns as they
are, not less their groups' means: groups that differ from each other make it larger.

Turns are compared with the same turn of the other members. A member that had ended by then earned
nothing more: it counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollart_algorithms.credit import Returns
from rollart_algorithms.options import GroupOptions

EPS = 1e-6
"""Returns whose standard deviation is below this have no preference: their advantages are 0."""

Baseline = Literal["group_mean", "leave_one_out"]


def group_advantages(
    members: Sequence[Returns], baseline: Baseline, options: GroupOptions, batch_std: float
) -> list[Returns]:
    """Return the advantages of each member.

    Args:
        members: ``[K_i]`` each.
        baseline: What they are compared with.
        options: Says what they are divided by.
        batch_std: Of the batch, see :func:`std_of`.
    """
    table = np.zeros((len(members), max(len(m) for m in members)), dtype=np.float64)
    for row, member in zip(table, members, strict=True):
        row[: len(member)] = member
    for k in range(table.shape[1]):
        table[:, k] = _compared(table[:, k].copy(), baseline, options, batch_std)
    return [row[: len(member)] for row, member in zip(table, members, strict=True)]


def std_of(groups: Sequence[Sequence[Returns]], options: GroupOptions) -> float:
    """Return the standard deviation of all returns; 1 where it is not asked for or is 0.

    With ``credit: turn`` a return is that of a turn, and long members have more of them.
    """
    if options.normalise != "batch_std":
        return 1.0
    returns = np.concatenate([member for members in groups for member in members])
    if is_flat(returns):
        return 1.0
    return max(float(returns.std(ddof=options.std_correction)), options.std_floor)


def is_flat(returns: npt.NDArray[np.float64]) -> bool:
    """Return whether returns are all the same, but for rounding."""
    return bool(returns.std() < EPS * max(1.0, float(np.abs(returns).max())))


def _compared(
    returns: Returns, baseline: Baseline, options: GroupOptions, batch_std: float
) -> Returns:
    if is_flat(returns):
        return np.zeros_like(returns)
    advantages: Returns = returns - returns.mean()
    if baseline == "leave_one_out":
        advantages *= len(returns) / (len(returns) - 1)
    if options.normalise == "group_std":
        advantages /= max(float(returns.std(ddof=options.std_correction)), options.std_floor)
    elif options.normalise == "batch_std":
        advantages /= batch_std
    return advantages
