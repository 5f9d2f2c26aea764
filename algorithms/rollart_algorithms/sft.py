"""Supervised fine-tuning on demonstrations.

Takes: groups of demonstrations, or of any trajectories that are worth imitating. Gives: the mean
negative log likelihood of their tokens. Never: checks who wrote a token, or compares rewards.

    loss = -sum_i sum_t log pi_it / sum_i n_i                  (token_mean)

Maximum likelihood: the supervised step before RL of arXiv:2203.02155 (InstructGPT), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollart_algorithms.aggregation import aggregate
from rollart_algorithms.config import SFTConfig
from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals, ZeroAdvantage
from rollart_core.types import FloatArray, Group


class SFT(Algorithm):
    """Maximum likelihood of demonstrations.

    Args:
        options: The fields of :class:`SFTConfig`.
    """

    zero_advantage: ZeroAdvantage = "drop"

    def __init__(self, **options: float | str | None) -> None:
        self.config = SFTConfig.model_validate(options)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return 1 for each token to train on, else 0; see :class:`Algorithm`."""
        least = -np.inf if self.config.least_reward is None else self.config.least_reward
        return [
            s.loss_mask.astype(np.float32) * np.float32((t.reward or 0.0) >= least)
            for g in groups
            for t in g.trajectories
            for s in t.samples
        ]

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean negative log likelihood; see :class:`Algorithm`."""
        tokens = torch.where(batch.loss_mask, -trainer_logprobs * batch.advantages, 0.0)
        share = aggregate(tokens, batch, self.config.loss_aggregation)
        return share, {"nll": tokens.detach().sum()}
