"""REINFORCE with a leave-one-out baseline: a member's reward minus the mean of the others.

    A_i = R_i - mean of R_j over j != i           arXiv:2402.14740, section 3.2 (RLOO)
    w   = min(pi_trainer / pi_inference, max_ratio), no gradient

The loss of a token is `-w A log pi_trainer`, averaged over the tokens of the minibatch. The weight
corrects for samples of an older policy. Its cap keeps the variance finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.types import FloatArray, Group

from {{ cookiecutter.module }}.config import {{ cookiecutter.class_name }}Config


class {{ cookiecutter.class_name }}(Algorithm):
    """REINFORCE that compares each member of a group with the mean of the others.

    Args:
        max_ratio: Cap on the importance weight.
    """

    min_group_size: ClassVar[int] = 2

    def __init__(self, *, max_ratio: float = 2.0) -> None:
        self.config = {{ cookiecutter.class_name }}Config(max_ratio=max_ratio)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return one `[T]` row per sample, 0 for tokens that were not sampled."""
        rows: list[FloatArray] = []
        for group in groups:
            rewards = np.array([t.reward for t in group.trajectories], dtype=np.float64)
            # R_i - (sum - R_i) / (n - 1), written with the mean.
            values = (rewards - rewards.mean()) * len(rewards) / max(1, len(rewards) - 1)
            for trajectory, value in zip(group.trajectories, values, strict=True):
                rows += [s.loss_mask.astype(np.float32) * value for s in trajectory.samples]
        return [row.astype(np.float32) for row in rows]

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this microbatch's share of the loss, and metrics summed over its tokens."""
        mask = batch.loss_mask
        log_ratio = torch.where(mask, trainer_logprobs - batch.inference_logprobs, 0.0).detach()
        weight = log_ratio.exp().clamp(max=self.config.max_ratio)
        tokens = torch.where(mask, -weight * batch.advantages * trainer_logprobs, 0.0)
        metrics = {"is_ratio_mean": torch.where(mask, log_ratio.exp(), 0.0).sum()}
        return tokens.sum() / batch.total_loss_tokens, metrics
