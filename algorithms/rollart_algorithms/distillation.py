"""On-policy distillation: a teacher scores each token that the policy wrote.

Takes: groups with the teacher's logprobs of their tokens, then packed logprobs. Gives: advantages
that differ by token, then a loss. Never: needs samples of the teacher, or more of its distribution
than the probability of the one token.

    A_t = log pi_teacher - log pi_inference  (+ reward_coef (R_i - mean(R)))
    l_t = -w min(r A_t, clip(r, 1 - low, 1 + high) A_t)

On average ``-A_t`` is the reverse KL divergence KL(pi || teacher) at that token, and this loss is
its policy gradient with each token on its own (no discount): arXiv:2306.13649 (GKD), section 3,
on-policy data with reverse KL; arXiv:2306.08543 (MiniLLM), section 2.2, the single-step part; Lu
and Thinking Machines Lab 2025, "On-Policy Distillation".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart_algorithms.config import DistillationConfig
from rollart_algorithms.credit import mean_reward, require_siblings, reward_of
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.policy_gradient import RatioPolicy
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group


class OnPolicyDistillation(RatioPolicy):
    """Policy gradient of the reverse KL divergence from a teacher.

    Args:
        options: The fields of :class:`DistillationConfig`.
    """

    config_class = DistillationConfig
    config: DistillationConfig

    def wanted_signals(self) -> set[str]:
        """Return the names of the signals that these options need."""
        return super().wanted_signals() | {"teacher_logprobs"}

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return teacher minus policy logprob of each token; see :class:`PolicyGradient`."""
        if self.config.reward_coef:
            require_siblings(groups, "reward_coef")
        samples = [s for g in groups for s in g.samples]
        rewards = [
            self.config.reward_coef * (reward_of(t) - mean_reward(g))
            for g in groups
            for t in g.trajectories
            for _ in t.samples
        ]
        penalties = kl_penalties(groups, signals, self.config)
        rows: list[FloatArray] = []
        for i, (sample, teacher) in enumerate(
            zip(samples, signals["teacher_logprobs"], strict=True)
        ):
            row = teacher - sample.inference_logprobs + np.float32(rewards[i])
            if penalties is not None:
                row = row - penalties[i]
            rows.append(np.where(sample.loss_mask, row, 0).astype(np.float32))
        return rows
