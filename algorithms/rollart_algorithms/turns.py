"""The turns of an episode: the tokens, the reward and the initial state of each turn.

Takes: trajectory records. Gives: spans, per-turn rewards and anchors, for algorithms that assign
credit to turns. Never: imports torch, or changes a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose

import numpy as np

from rollart_core.types import FloatArray, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The tokens that the policy sampled in one turn, in one sample."""

    turn: int
    """Index into the turns of the trajectory."""
    start: int
    """Its first token."""
    stop: int
    """One past its last."""


def turn_spans(sample: Sample) -> list[TurnSpan]:
    """Return the spans of a sample's turns, in order; a turn without tokens has none."""
    at = np.flatnonzero(sample.loss_mask)
    if not len(at):
        return []
    turns = sample.turn_ids[at]
    cuts = np.flatnonzero(np.diff(turns)) + 1
    return [
        TurnSpan(int(turns[part[0]]), int(at[part[0]]), int(at[part[-1]]) + 1)
        for part in np.split(np.arange(len(at)), cuts)
    ]


def num_turns(trajectory: Trajectory) -> int:
    """Return the number of turns: as recorded, and at least as many as its tokens refer to."""
    seen = [int(s.turn_ids.max()) + 1 for s in trajectory.samples if s.num_loss_tokens]
    return max([len(trajectory.turns), *seen])


def turn_rewards(trajectory: Trajectory) -> FloatArray:
    """Return the reward of each turn, ``[num_turns]``; the sum is the trajectory's reward.

    These are the rewards of ``env.step`` if their sum equals the trajectory's reward. Otherwise a
    reward function scored the whole episode, and the last turn gets the whole reward.
    """
    given = [turn.reward for turn in trajectory.turns]
    rewards = np.zeros(num_turns(trajectory), dtype=np.float32)
    total = trajectory.reward or 0.0
    if given and isclose(sum(given), total, rel_tol=1e-6, abs_tol=1e-9):
        rewards[: len(given)] = given
    elif len(rewards):
        rewards[-1] = total
    return rewards


def turn_returns(rewards: FloatArray, discount: float) -> FloatArray:
    """Return the discounted sum of rewards from each turn: ``G_k = r_k + discount G_{k+1}``."""
    returns = np.zeros(len(rewards), dtype=np.float64)
    ahead = 0.0
    for k in range(len(rewards) - 1, -1, -1):
        ahead = returns[k] = float(rewards[k]) + discount * ahead
    return returns.astype(np.float32)


def anchors(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the anchor of each turn: a digest of the observation before it.

    Turns of one group with equal anchors started in the same state of the environment. They are the
    anchor states of GiGPO (arXiv:2505.10978).
    """
    return tuple(
        blake2b(turn.observation.encode(), digest_size=16).hexdigest() for turn in trajectory.turns
    )


def spread_over_turns(sample: Sample, per_turn: Sequence[float] | FloatArray) -> FloatArray:
    """Return ``[T]``: the value of its turn at each sampled token, 0 elsewhere."""
    row = np.zeros(sample.num_tokens, dtype=np.float32)
    mask = sample.loss_mask
    row[mask] = np.asarray(per_turn, dtype=np.float32)[sample.turn_ids[mask]]
    return row
