"""What rewards become on their way to the algorithm: penalties, one size for all environments.

Takes: groups, and the ``shaping`` of each environment. Gives: the same groups with other rewards,
turn by turn too, and running statistics that a checkpoint keeps. Never: changes a record (what is
journalled and reported is what was earned), or imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollart_core.config.training import Overlong, Shaping
from rollart_core.types import Group, Trajectory

Statistics = npt.NDArray[np.float64]
"""``[E, 3]``: number, mean and sum of squared deviations of each environment's rewards."""


@dataclass(slots=True)
class RewardShaper:
    """Shapes the rewards of a run.

    Statistics are Welford's, merged batch by batch (Chan, Golub and LeVeque 1979).
    """

    shapings: Mapping[str, Shaping]
    """By the name of the environment; those that are not here are left alone."""
    statistics: Statistics
    """Of the environments in the order of their names."""

    @classmethod
    def of(cls, shapings: Mapping[str, Shaping]) -> RewardShaper:
        """Return one that has seen nothing yet."""
        return cls(dict(sorted(shapings.items())), np.zeros((len(shapings), 3)))

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with shaped rewards; what they were counts for the statistics first."""
        penalised = [self._penalised(g) for g in groups]
        for k, (name, shaping) in enumerate(self.shapings.items()):
            if shaping.normalise == "running":
                rewards = [
                    t.reward or 0.0
                    for g in penalised
                    if g.task.env_id == name
                    for t in g.trajectories
                ]
                self.statistics[k] = _merged(self.statistics[k], np.array(rewards))
        return [self._scaled(g) for g in penalised]

    def _penalised(self, group: Group) -> Group:
        shaping = self.shapings.get(group.task.env_id)
        if shaping is None or shaping.overlong is None:
            return group
        less = [overlong_penalty(t.num_loss_tokens, shaping.overlong) for t in group.trajectories]
        return _with(
            group,
            [
                _rewarded(t, (t.reward or 0.0) - p, 1.0)
                for t, p in zip(group.trajectories, less, strict=True)
            ],
        )

    def _scaled(self, group: Group) -> Group:
        shaping = self.shapings.get(group.task.env_id)
        if shaping is None:
            return group
        mean, std = 0.0, 1.0
        if shaping.normalise == "running":
            number, mean, squares = self.statistics[list(self.shapings).index(group.task.env_id)]
            std = math.sqrt(squares / number) or 1.0
        members = []
        for trajectory in group.trajectories:
            value = ((trajectory.reward or 0.0) - mean) / std * shaping.scale
            if shaping.clip is not None:
                value = min(max(value, shaping.clip[0]), shaping.clip[1])
            members.append(_rewarded(trajectory, value, shaping.scale / std))
        return _with(group, members)


def overlong_penalty(num_tokens: int, overlong: Overlong) -> float:
    """Return what an episode of so many sampled tokens loses.

    0 up to ``max_tokens - buffer_tokens``, ``penalty`` from ``max_tokens`` on, linear between: the
    soft overlong punishment of DAPO (arXiv:2503.14476, section 3.4), times ``penalty``.
    """
    over = num_tokens - (overlong.max_tokens - overlong.buffer_tokens)
    return overlong.penalty * min(max(over / overlong.buffer_tokens, 0.0), 1.0)


def _rewarded(trajectory: Trajectory, reward: float, factor: float) -> Trajectory:
    """Return a trajectory with another reward; its turns' are scaled, and the last has the rest."""
    turns = trajectory.turns
    given = sum(turn.reward for turn in turns)
    if turns and math.isclose(given, trajectory.reward or 0.0, rel_tol=1e-6, abs_tol=1e-9):
        scaled = [turn.reward * factor for turn in turns]
        scaled[-1] += reward - sum(scaled)
        turns = tuple(replace(t, reward=r) for t, r in zip(turns, scaled, strict=True))
    return replace(trajectory, reward=reward, turns=turns)


def _with(group: Group, members: Sequence[Trajectory]) -> Group:
    return replace(group, trajectories=tuple(members))


def _merged(known: Statistics, rewards: npt.NDArray[np.float64]) -> Statistics:
    """Return number, mean and squared deviations of what is known and what is new together."""
    if not len(rewards):
        return known
    number, mean, squares = known
    total = number + len(rewards)
    step = rewards.mean() - mean
    return np.array(
        [
            total,
            mean + step * len(rewards) / total,
            squares
            + ((rewards - rewards.mean()) ** 2).sum()
            + step * step * number * len(rewards) / total,
        ]
    )
