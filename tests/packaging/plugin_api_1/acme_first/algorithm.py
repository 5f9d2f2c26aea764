"""REINFORCE with the mean of the group as the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.types import FloatArray, Group


class Mean(Algorithm):
    """Trains no module beside the policy, and says so in the way of version 1."""

    min_group_size = 2

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the distance of each reward to the group's mean."""
        rows: list[FloatArray] = []
        for group in groups:
            mean = float(np.mean([member.reward or 0.0 for member in group.trajectories]))
            for member in group.trajectories:
                for sample in member.samples:
                    advantage = (member.reward or 0.0) - mean
                    rows.append(np.where(sample.loss_mask, advantage, 0.0).astype(np.float32))
        return rows

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return minus the weighted sum of logprobs over the tokens of the minibatch."""
        gain = torch.where(batch.loss_mask, trainer_logprobs * batch.advantages, 0.0)
        return -gain.sum() / batch.total_loss_tokens, {}

    def extra_modules(self) -> dict[str, torch.nn.Module]:
        """Return none."""
        return {}
