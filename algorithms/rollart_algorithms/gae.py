"""Generalised advantage estimation over the sampled tokens of one trajectory.

Takes: rewards and values of its tokens, one after the other over all its samples. Gives: their
advantages. Never: sees a token that the environment wrote.

    delta_t = r_t + gamma_t V_{t+1} - V_t           arXiv:1506.02438 (GAE), section 3
    A_t     = delta_t + gamma_t lambda_t A_{t+1}    the same, as a recurrence

``gamma_t`` and ``lambda_t`` may differ by token: with 1 inside a turn and less where one ends, time
is counted in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart_core.contracts.turns import turn_rewards
from rollart_core.types import Trajectory

Row = npt.NDArray[np.float64]
"""``[K]``, the sampled tokens of a trajectory."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Where the turns of a trajectory end, among its ``K`` sampled tokens."""

    turns: npt.NDArray[np.int32]
    """``[K]``, the turn of each."""
    is_end: npt.NDArray[np.bool_]
    """``[K]``, True at the last token of each turn."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TurnEnds:
        """Return those of a trajectory with at least one sampled token."""
        turns = np.concatenate([s.turn_ids[s.loss_mask] for s in trajectory.samples])
        return cls(turns, np.append(turns[1:] != turns[:-1], True))


def token_rewards(trajectory: Trajectory, ends: TurnEnds, *, per_turn: bool) -> Row:
    """Return ``[K]`` what each token earned: it adds up to the trajectory's reward.

    Args:
        trajectory: Not failed, with at least one sampled token.
        ends: Of its turns.
        per_turn: Whether what a turn earned falls on its last token, or all on the last of all. A
            turn without tokens leaves its reward to the next that has some, or the last.
    """
    rewards = np.zeros(len(ends.turns), dtype=np.float64)
    if not per_turn:
        rewards[-1] = trajectory.reward or 0.0
        return rewards
    at = np.flatnonzero(ends.is_end)
    for turn, reward in enumerate(turn_rewards(trajectory)):
        place = int(np.searchsorted(ends.turns[at], turn))
        rewards[at[min(place, len(at) - 1)]] += reward
    return rewards


def generalised_advantages(rewards: Row, values: Row, gamma: Row, lam: Row) -> Row:
    """Return ``[K]`` advantages.

    Args:
        rewards: ``[K]``.
        values: ``[K]``; after the last token the value is 0.
        gamma: ``[K]``, discount between this token and the next.
        lam: ``[K]``, likewise.
    """
    advantages = []
    ahead = next_value = 0.0
    # Python's own numbers: numpy's one by one take several times as long.
    columns = (column[::-1].tolist() for column in (rewards, values, gamma, lam))
    for reward, value, discount, trace in zip(*columns, strict=True):
        delta = reward + discount * next_value - value
        ahead = delta + discount * trace * ahead
        advantages.append(ahead)
        next_value = value
    return np.array(advantages[::-1], dtype=np.float64)
