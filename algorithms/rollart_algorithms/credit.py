"""The reward that each trajectory, or each turn of it, earned.

Takes: trajectories, and penalties of their tokens. Gives: returns in the order of turns, and rows
of tokens. Never: compares trajectories with each other; ``group_advantages.py`` does that.

    trajectory   R                                       one number for all tokens
    turn         G_k = sum_{j >= k} discount^(j-k) r_j   for the tokens of turn k

arXiv:2505.10978 (GiGPO), section 4, for the discounted return of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rollart_algorithms.options import CreditOptions
from rollart_algorithms.turns import (
    num_turns,
    spread_over_turns,
    turn_returns,
    turn_rewards,
)
from rollart_core.types import FloatArray, Group, Trajectory

Returns = npt.NDArray[np.float64]
"""``[K]`` of one trajectory: the return from each turn on; or ``[1]``: the total."""


def group_returns(
    groups: Sequence[Group], options: CreditOptions | None, penalties: Sequence[FloatArray] | None
) -> list[list[Returns]]:
    """Return the returns of each member of each group.

    Args:
        groups: Groups without failed members. Each member has a reward.
        options: Options that select the tokens a reward is credited to. None: the trajectory.
        penalties: One ``[T]`` per sample, subtracted from the reward. None: no penalty.
    """
    given = per_trajectory(groups, penalties)
    return [[_returns(t, options, next(given)) for t in g.trajectories] for g in groups]


def per_trajectory(
    groups: Sequence[Group], rows: Sequence[FloatArray] | None
) -> Iterator[Sequence[FloatArray]]:
    """Yield for each trajectory the rows of its samples; empty if ``rows`` is None."""
    given = iter(rows or ())
    for group in groups:
        for trajectory in group.trajectories:
            yield [] if rows is None else [next(given) for _ in trajectory.samples]


def reward_of(trajectory: Trajectory) -> float:
    """Return the reward of a trajectory. Groups have no failed trajectories, so it is set."""
    reward = trajectory.reward
    assert reward is not None, f"{trajectory.ticket.ticket_id} failed: it must not be in a group"
    return reward


def mean_reward(group: Group) -> float:
    """Return the mean reward of the members that are in a group."""
    return float(np.mean([reward_of(t) for t in group.trajectories]))


def require_siblings(groups: Sequence[Group], option: str) -> None:
    """Reject a batch in which no group has two members.

    Args:
        groups: The batch.
        option: The option that compares them, such as ``baseline: group_mean``.

    Raises:
        ValueError: If no group has two members.
    """
    if groups and all(len(group.trajectories) < 2 for group in groups):
        raise ValueError(
            f"algorithm: {option} compares the members of a group, but no group of the batch has "
            "two; set rollout.group_size to 2 or more, or remove the option"
        )


def rows_of(trajectory: Trajectory, values: Returns) -> list[FloatArray]:
    """Return one ``[T]`` per sample: the value of its turn, or the total, at each sampled token.

    Args:
        trajectory: The trajectory of the samples.
        values: ``[K]``, one per turn, or ``[1]``.
    """
    if len(values) == 1:
        value = values.astype(np.float32)[0]
        return [s.loss_mask.astype(np.float32) * value for s in trajectory.samples]
    return [spread_over_turns(s, values.astype(np.float32)) for s in trajectory.samples]


def turn_sums(trajectory: Trajectory, rows: Sequence[FloatArray]) -> Returns:
    """Return ``[K]``: the sum of ``rows`` (``[T]`` per sample) over each turn's sampled tokens."""
    sums = np.zeros(num_turns(trajectory), dtype=np.float64)
    for sample, row in zip(trajectory.samples, rows, strict=True):
        at = sample.loss_mask
        np.add.at(sums, sample.turn_ids[at], row[at])
    return sums


def _returns(
    trajectory: Trajectory, options: CreditOptions | None, penalties: Sequence[FloatArray]
) -> Returns:
    if options is None or options.credit == "trajectory":
        spent = sum(float(row.sum(dtype=np.float64)) for row in penalties)
        return np.array([reward_of(trajectory) - spent], dtype=np.float64)
    earned = turn_rewards(trajectory).astype(np.float64)
    if len(penalties):
        earned -= turn_sums(trajectory, penalties)
    return turn_returns(earned.astype(np.float32), options.discount).astype(np.float64)
