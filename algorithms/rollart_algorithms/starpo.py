"""StarPO: optimise the whole trajectory of states, thoughts, actions and rewards.

Takes, gives and never: as in ``grpo.py``, with other defaults. Some groups can be left out.

    A_i  = (R_i - mean(R)) / std(R)                              R_i: reward of the whole trajectory
    loss = -1/B' sum_i 1/n_i sum_t min(r A_i, clip(r, 1 - low, 1 + high) A_i)

over ``B'`` trajectories of ``n_i`` tokens, all turns together: arXiv:2504.20073 (RAGEN). From the
stabilised StarPO-S, this file has the filter that keeps the groups whose rewards vary most
(``keep_groups``) and the decoupled clip. The critic of StarPO-S is PPO's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollart_algorithms.config import StarPOConfig
from rollart_algorithms.credit import Returns
from rollart_algorithms.grpo import GRPO


class StarPO(GRPO):
    """GRPO of whole trajectories, on the groups in which the policy is least certain.

    Args:
        options: The fields of :class:`StarPOConfig`.
    """

    config_class = StarPOConfig
    config: StarPOConfig

    def compare(self, groups: Sequence[Sequence[Returns]]) -> list[Returns]:
        """Return the advantages of all members: 0 in the groups that are left out."""
        spread = [float(np.std([member[:1].sum() for member in members])) for members in groups]
        num_kept = math.ceil(self.config.keep_groups * len(groups))
        kept = set(sorted(range(len(groups)), key=lambda g: -spread[g])[:num_kept])
        values = iter(super().compare(groups))
        return [
            next(values) * float(g in kept) for g, members in enumerate(groups) for _ in members
        ]
