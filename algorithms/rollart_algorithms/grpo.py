"""Group relative policy optimisation.

Takes: groups of scored trajectories, then packed logprobs. Gives: advantages, then a loss.
Never: asks for a critic; the other members of a group are the baseline.

With members ``i`` of a group, rewards ``R_i``, tokens ``t`` and

    A_i  = (R_i - mean(R)) / std(R)                      arXiv:2402.03300, section 4.1.2
    r    = pi_trainer / pi_proximal                      per token
    w    = min(pi_proximal / pi_inference, cap)          truncated importance sampling, no gradient
    KL   = pi_ref/pi_trainer - log(pi_ref/pi_trainer) - 1          arXiv:2402.03300, equation 4

the loss of a token is ``-w min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL``: equation 3 of
arXiv:2402.03300 (with ``sample_mean``), with the two clip bounds and the token mean of
arXiv:2503.14476 (DAPO, sections 3.1 and 3.3). For ``w`` see ``off_policy.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollart_algorithms.config import GroupPolicyOptions, GRPOConfig
from rollart_algorithms.credit import Returns, group_returns, rows_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_algorithms.relative import Baseline, relative, std_of
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group


class GRPO(RatioPolicy):
    """Group relative policy optimisation, with clip-higher and truncated importance sampling.

    Args:
        options: The fields of :class:`GRPOConfig`.
    """

    config_class: ClassVar[type[GroupPolicyOptions]] = GRPOConfig
    config: GroupPolicyOptions
    baseline: ClassVar[Baseline] = "group_mean"
    min_group_size: ClassVar[int] = 2

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the group-relative advantage of each sampled token; see :class:`Algorithm`."""
        penalties = kl_penalties(groups, signals, self.config)
        returns = group_returns(groups, self.config, penalties)
        values = iter(self.compare(returns))
        return [row for g in groups for t in g.trajectories for row in rows_of(t, next(values))]

    def compare(self, groups: Sequence[Sequence[Returns]]) -> list[Returns]:
        """Return the advantages of all members, in order, from their returns."""
        batch_std = std_of(groups, self.config)
        return [
            member
            for members in groups
            for member in relative(members, self.baseline, self.config, batch_std)
        ]
