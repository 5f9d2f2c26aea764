"""Generalised advantage estimation over the sampled tokens of one trajectory.

Takes: rewards and values of its tokens, in the order of its turns, whichever sample each is in.
Gives: their advantages. Never: sees a token that the environment wrote.

    delta_t = r_t + gamma_t V_{t+1} - V_t           arXiv:1506.02438 (GAE), section 3
    A_t     = delta_t + gamma_t lambda_t A_{t+1}    the same, as a recurrence

``gamma_t`` and ``lambda_t`` may differ by token: with 1 inside a turn and less where one ends, time
is counted in turns.
"""

from __future__ import annotations

import numpy as np

from rollart_algorithms.timeline import Row, Timeline
from rollart_core.contracts.turns import turn_rewards
from rollart_core.types import Trajectory


def token_rewards(trajectory: Trajectory, timeline: Timeline, *, per_turn: bool) -> Row:
    """Return ``[K]`` what each token earned, by turns: together the trajectory's reward.

    Args:
        trajectory: Not failed, with at least one sampled token.
        timeline: Its own.
        per_turn: Whether what a turn earned falls on its last token, or all on the last of all. A
            turn without tokens leaves its reward to the next that has some, or the last.
    """
    rewards = np.zeros(len(timeline.turns), dtype=np.float64)
    if not per_turn:
        rewards[-1] = trajectory.reward or 0.0
        return rewards
    at = np.flatnonzero(timeline.is_end)
    for turn, reward in enumerate(turn_rewards(trajectory)):
        place = int(np.searchsorted(timeline.turns[at], turn))
        rewards[at[min(place, len(at) - 1)]] += reward
    return rewards


def generalised_advantages(
    rewards: Row, values: Row, gamma: Row, lam: Row, *, last_value: float = 0.0
) -> Row:
    """Return ``[K]`` advantages.

    Args:
        rewards: ``[K]``.
        values: ``[K]``.
        gamma: ``[K]``, discount between this token and the next.
        lam: ``[K]``, likewise.
        last_value: The value after the last token: 0 where the episode ended there.
    """
    advantages = []
    ahead, next_value = 0.0, last_value
    # Python's own numbers: numpy's one by one take several times as long.
    columns = (column[::-1].tolist() for column in (rewards, values, gamma, lam))
    for reward, value, discount, trace in zip(*columns, strict=True):
        delta = reward + discount * next_value - value
        ahead = delta + discount * trace * ahead
        advantages.append(ahead)
        next_value = value
    return np.array(advantages[::-1], dtype=np.float64)
