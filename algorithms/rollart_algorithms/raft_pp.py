"""RAFT++: train only on the best answers, with ratio and clip.

Takes: groups of scored trajectories, then packed logprobs. Gives: advantages of 1 or 0, then a
loss. Never: lowers the probability of an answer on purpose.

    A_i  = 1 where R_i = max(R), else 0
    loss = -1/B sum_i 1/n_i sum_t min(r A_i, clip(r, 1 - low, 1 + high) A_i)

arXiv:2504.11343 (Xiong et al.). A group whose members all have the same reward has no best member
and is left out, unless ``least_reward`` sets a threshold. ``B`` counts all samples
(with ``zero_advantage: drop``, only those that are trained on).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart_algorithms.config import RAFTPPConfig
from rollart_algorithms.credit import group_returns, rows_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.group_advantages import EPS, is_flat
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import BoolArray, FloatArray, Group


class RAFTPP(RatioPolicy):
    """Reward-ranked fine-tuning with importance ratios and clipping.

    Args:
        options: The fields of :class:`RAFTPPConfig`.
    """

    config_class = RAFTPPConfig
    config: RAFTPPConfig

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return 1 for the tokens of the selected trajectories; see :class:`PolicyGradient`."""
        penalties = kl_penalties(groups, signals, self.config)
        rows: list[FloatArray] = []
        for group, members in zip(groups, group_returns(groups, None, penalties), strict=True):
            chosen = self._chosen(np.array([member[0] for member in members]))
            for trajectory, is_chosen in zip(group.trajectories, chosen, strict=True):
                rows += rows_of(trajectory, np.array([float(is_chosen)]))
        return rows

    def _chosen(self, rewards: FloatArray) -> BoolArray:
        if self.config.least_reward is not None:
            return np.asarray(rewards >= self.config.least_reward)
        if is_flat(np.asarray(rewards, dtype=np.float64)):
            return np.zeros(len(rewards), dtype=bool)
        return np.asarray(rewards >= rewards.max() - EPS * max(1.0, float(abs(rewards.max()))))
