"""GiGPO: groups within groups, formed by the states that trajectories have in common.

Takes: groups of scored trajectories with their turns, then packed logprobs. Gives: advantages that
differ by turn, then a loss. Never: needs a critic or additional rollouts.

    A^E_i  = (R_i - mean(R)) / F                       of trajectory i in its group
    G_ik   = sum_{j >= k} discount^(j-k) r_ij          of turn k
    A^S_ik = (G_ik - mean(G in S)) / F                 S: all turns of the group, of any trajectory,
                                                       that started in the same state
    A_ik   = A^E_i + step_weight A^S_ik

arXiv:2505.10978 (GiGPO), section 4; ``F`` is the standard deviation, or 1 with
``normalise: none``. Two turns started in the same state if the environment showed the same text
before them. A state that occurs once cannot be compared: its ``A^S`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rollart_algorithms.config import GiGPOConfig
from rollart_algorithms.credit import Returns, group_returns, rows_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.group_advantages import group_advantages
from rollart_algorithms.options import CreditOptions
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_algorithms.turns import anchors
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group


class GiGPO(RatioPolicy):
    """Group-in-group policy optimisation.

    Args:
        options: The fields of :class:`GiGPOConfig`.
    """

    config_class = GiGPOConfig
    config: GiGPOConfig
    min_group_size: ClassVar[int] = 2

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the sum of trajectory and step advantages; see :class:`PolicyGradient`."""
        penalties = kl_penalties(groups, signals, self.config)
        by_turn = CreditOptions(credit="turn", discount=self.config.discount)
        episodes = group_returns(groups, None, penalties)
        steps = group_returns(groups, by_turn, penalties)
        rows: list[FloatArray] = []
        for group, whole, turns in zip(groups, episodes, steps, strict=True):
            macro = self._compared(whole)
            micro = self._of_steps(group, turns)
            for trajectory, of_all, of_turns in zip(group.trajectories, macro, micro, strict=True):
                rows += rows_of(trajectory, of_all + self.config.step_weight * of_turns)
        return rows

    def _of_steps(self, group: Group, returns: Sequence[Returns]) -> list[Returns]:
        """Return ``[K]`` per member: each turn compared with those of the same initial state."""
        values = [np.zeros(len(member), dtype=np.float64) for member in returns]
        states: dict[str, list[tuple[int, int]]] = {}
        for i, trajectory in enumerate(group.trajectories):
            for k, anchor in enumerate(anchors(trajectory)):
                states.setdefault(anchor, []).append((i, k))
        for met in states.values():
            of_state = self._compared([returns[i][k : k + 1] for i, k in met])
            for (i, k), value in zip(met, of_state, strict=True):
                values[i][k] = value[0]
        return values

    def _compared(self, members: Sequence[Returns]) -> list[Returns]:
        return group_advantages(members, "group_mean", self.config, 1.0)
