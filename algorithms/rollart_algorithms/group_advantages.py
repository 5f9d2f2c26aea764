"""Baselines and normalisation: how the members of a group are compared.

Takes: the returns of the members that are in a group; failed ones are not. Gives: their
advantages. Never: counts a missing member.

With ``M`` members and returns ``R_i``:

    group_mean      A_i = R_i - mean(R)                      arXiv:2402.03300 (GRPO), section 4.1.2
    leave_one_out   A_i = R_i - sum_{j != i} R_j / (M - 1)   arXiv:2402.14740 (RLOO)
    / group_std     of the members                           arXiv:2402.03300, section 4.1.2
    / batch_std     of all returns of the batch              arXiv:2508.08221 (Lite PPO)

A standard deviation is at least ``std_floor``. ``batch_std`` is the standard deviation of the
returns without subtracting group means: differences between groups make it larger.

Turns are compared with the same turn of the other members. A member that has already ended counts
as 0, because it earns nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollart_algorithms.credit import Returns
from rollart_algorithms.options import GroupOptions

EPS = 1e-6
"""If the standard deviation of returns is below this, their advantages are 0."""

Baseline = Literal["group_mean", "leave_one_out"]


def group_advantages(
    members: Sequence[Returns], baseline: Baseline, options: GroupOptions, batch_std: float
) -> list[Returns]:
    """Return the advantages of each member.

    Args:
        members: ``[K_i]`` of each member.
        baseline: What returns are compared with.
        options: Options that set the divisor.
        batch_std: The standard deviation of the batch, see :func:`std_of`.
    """
    table = np.zeros((len(members), max(len(m) for m in members)), dtype=np.float64)
    for row, member in zip(table, members, strict=True):
        row[: len(member)] = member
    for k in range(table.shape[1]):
        table[:, k] = _compared(table[:, k].copy(), baseline, options, batch_std)
    return [row[: len(member)] for row, member in zip(table, members, strict=True)]


def std_of(groups: Sequence[Sequence[Returns]], options: GroupOptions) -> float:
    """Return the standard deviation of all returns; 1 if it is not used or is 0.

    With ``credit: turn`` each turn has one return, so long members contribute more of them.
    """
    if options.normalise != "batch_std":
        return 1.0
    returns = np.concatenate([member for members in groups for member in members])
    if is_flat(returns):
        return 1.0
    return max(float(returns.std(ddof=options.std_correction)), options.std_floor)


def is_flat(returns: npt.NDArray[np.float64]) -> bool:
    """Return whether returns are all equal, except for rounding."""
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
