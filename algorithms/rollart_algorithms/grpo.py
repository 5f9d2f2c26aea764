"""Group relative policy optimisation.

Takes: groups of scored trajectories, then packed logprobs. Gives: advantages, then a loss.
Never: needs a critic; the other members of a group are the baseline.

With members ``i`` of a group, rewards ``R_i``, tokens ``t`` and

    A_i  = (R_i - mean(R)) / std(R)                      arXiv:2402.03300, section 4.1.2
    r    = pi_trainer / pi_proximal                      per token
    w    = min(pi_proximal / pi_inference, cap)          truncated importance sampling, no gradient
    KL   = pi_ref/pi_trainer - log(pi_ref/pi_trainer) - 1          arXiv:2402.03300, equation 4

The loss of a token is ``-w min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL``. The loss of a
batch is the mean over samples of the mean over their tokens: equation 3 of arXiv:2402.03300. The
clip bounds are 0.2, as in PPO; the paper gives none. One default differs from the paper:
``kl_coef`` is 0, not 0.04, because a KL term needs a forward pass of the reference for every
token. For ``w`` see ``policy_gradient.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollart_algorithms.config import GRPOConfig
from rollart_algorithms.credit import Returns, group_returns, rows_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.group_advantages import Baseline, group_advantages, std_of
from rollart_algorithms.options import GroupPolicyOptions
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group


class GRPO(RatioPolicy):
    """Group relative policy optimisation, with truncated importance sampling.

    Args:
        options: The fields of :class:`GRPOConfig`.
    """

    config_class: ClassVar[type[GroupPolicyOptions]] = GRPOConfig
    config: GroupPolicyOptions
    baseline: ClassVar[Baseline] = "group_mean"
    min_group_size: ClassVar[int] = 2

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the group-relative advantage of each token; see :class:`PolicyGradient`."""
        penalties = kl_penalties(groups, signals, self.config)
        returns = group_returns(groups, self.config, penalties)
        values = iter(self.compare(returns))
        return [row for g in groups for t in g.trajectories for row in rows_of(t, next(values))]

    def compare(self, groups: Sequence[Sequence[Returns]]) -> list[Returns]:
        """Return the advantages of all members, in order, computed from their returns."""
        batch_std = std_of(groups, self.config)
        return [
            member
            for members in groups
            for member in group_advantages(members, self.baseline, self.config, batch_std)
        ]
