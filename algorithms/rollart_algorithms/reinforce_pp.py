"""REINFORCE++: PPO without a critic; the whole batch is the baseline.

Takes: groups (also of one member), then packed logprobs. Gives: advantages, then a loss.
Never: needs a critic.

    G_t = R - kl_coef sum_{s >= t} KL_s             return of a token, with the KL in the reward
    A_t = (G_t - mean(G)) / std(G)                  over all tokens of the batch

    with baseline: group_mean                       "REINFORCE++-baseline"
    A_t = (G'_t - mean(G')) / std(G'),  G'_t = G_t - mean of R in the group

arXiv:2501.03262 (REINFORCE++). Tokens are in the order of turns, whichever sample they are in. The
objective is the clipped one of ``policy_gradient.py``. The KL divergence is k1 in the reward unless
the options change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart_algorithms.config import ReinforcePPConfig
from rollart_algorithms.credit import (
    group_returns,
    mean_reward,
    per_trajectory,
    require_siblings,
    rows_of,
)
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_algorithms.timeline import Timeline
from rollart_algorithms.whitening import whitened
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group, Trajectory


class ReinforcePP(RatioPolicy):
    """REINFORCE with token returns that are normalised over the batch.

    Args:
        options: The fields of :class:`ReinforcePPConfig`.
    """

    config_class = ReinforcePPConfig
    config: ReinforcePPConfig

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return each token's return, normalised over the batch; see :class:`PolicyGradient`."""
        if self.config.baseline == "group_mean":
            require_siblings(groups, "baseline: group_mean")
        penalties = kl_penalties(groups, signals, self.config)
        spent = per_trajectory(groups, penalties)
        rows: list[FloatArray] = []
        for group, members in zip(groups, group_returns(groups, self.config, None), strict=True):
            baseline = mean_reward(group) if self.config.baseline == "group_mean" else 0.0
            for trajectory, returns in zip(group.trajectories, members, strict=True):
                plain = rows_of(trajectory, returns - baseline)
                rows += _less_what_follows(trajectory, plain, next(spent))
        return whitened(rows, [s.loss_mask for g in groups for s in g.samples])


def _less_what_follows(
    trajectory: Trajectory, rows: Sequence[FloatArray], penalties: Sequence[FloatArray]
) -> list[FloatArray]:
    """Return ``rows`` minus the sum of penalties from each token to the last one in time."""
    if not len(penalties) or not trajectory.num_loss_tokens:
        return list(rows)
    timeline = Timeline.of(trajectory)
    ahead = np.flip(np.cumsum(np.flip(timeline.joined(penalties))))
    return timeline.parted(timeline.joined(rows) - ahead)
