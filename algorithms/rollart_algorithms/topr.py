"""TOPR: tapered off-policy REINFORCE.

Takes: groups (also of one member), then packed logprobs. Gives: advantages, then a loss.
Never: recomputes logprobs. It is made for data of another policy.

With ``A_i = R_i - baseline`` of trajectory ``i``:

    w_i  = 1                                        where A_i >= 0
           min(pi(y_i) / pi_inference(y_i), cap)    where A_i < 0, no gradient; cap is 1
    loss = -1/B sum_i w_i A_i sum_t log pi_it

arXiv:2503.14286 (TOPR), section 3. Positive examples are trained on as in supervised learning,
however unlikely they are. Negative examples are pushed down only while the policy can still produce
them, so the loss stays bounded. The ratio is that of the whole sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rollart_algorithms.aggregation import sample_sums
from rollart_algorithms.config import TOPRConfig
from rollart_algorithms.credit import group_returns, mean_reward, require_siblings, rows_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.policy_gradient import Metrics, PolicyGradient
from rollart_core.contracts.algorithm import LossBatch, Signals
from rollart_core.types import FloatArray, Group


class TOPR(PolicyGradient):
    """REINFORCE with an importance weight that tapers negative examples only.

    Args:
        options: The fields of :class:`TOPRConfig`.
    """

    config_class = TOPRConfig
    config: TOPRConfig

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return rewards minus the baseline; see :class:`PolicyGradient`."""
        if self.config.baseline == "group_mean":
            require_siblings(groups, "baseline: group_mean")
        penalties = kl_penalties(groups, signals, self.config)
        rows: list[FloatArray] = []
        for group, members in zip(
            groups, group_returns(groups, self.config, penalties), strict=True
        ):
            baseline = self.config.baseline
            if baseline == "group_mean":
                baseline = mean_reward(group)
            for trajectory, returns in zip(group.trajectories, members, strict=True):
                rows += rows_of(trajectory, returns - baseline)
        return rows

    def objective(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the tapered log likelihood of each token; see :class:`PolicyGradient`."""
        log_ratio = torch.where(
            batch.loss_mask, trainer_logprobs - batch.inference_logprobs, 0.0
        ).detach()
        log_weight = sample_sums(log_ratio, batch)
        is_negative = batch.advantages < 0
        capped = log_weight.clamp(max=math.log(self.config.weight_cap)).exp()
        weight = torch.where(is_negative, capped, 1.0)
        is_cut = is_negative & (log_weight > math.log(self.config.weight_cap))
        is_ratio = log_ratio.exp()
        return -weight * batch.advantages * trainer_logprobs, {
            "clip_fraction": is_cut.float(),
            "negative_fraction": is_negative.float(),
            "is_ratio_mean": is_ratio,
            "is_ratio_max": is_ratio,
            "is_weight_mean": weight,
            "is_weight_sq_mean": weight.square(),
        }
