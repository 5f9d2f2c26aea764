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
arXiv:2503.14476 (DAPO, sections 3.1 and 3.3). Splitting the proximal policy from the one that
sampled is arXiv:2110.00641 (section 3) and, for asynchronous RL of language models,
arXiv:2505.24298 (section 5.2); truncating the weight is equation 1 of arXiv:1802.01561 (rho-bar)
and, between the engines of one run, Yao et al. 2025, "Your efficient RL framework secretly brings
you off-policy RL training".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from rollart_algorithms.config import DEFAULT_TIS_CAP, GRPOConfig
from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.types import FloatArray, Group

if TYPE_CHECKING:
    from rollart_core.contracts.algorithm import ZeroAdvantage

_EPS = 1e-6
"""A group whose standard deviation is below this has no preference: its advantages are 0."""


class GRPO(Algorithm):
    """Group relative policy optimisation, with clip-higher and truncated importance sampling.

    Args:
        options: The fields of :class:`GRPOConfig`.
    """

    min_group_size: ClassVar[int] = 2

    def __init__(self, **options: float | str | None) -> None:
        self.config = config = GRPOConfig.model_validate(options)
        signals = {"proximal_logprobs": config.proximal == "recompute"}
        signals["ref_logprobs"] = config.kl_coef > 0
        self.requires = frozenset(name for name, wanted in signals.items() if wanted)
        self.tis_cap = config.tis_cap or DEFAULT_TIS_CAP
        self.zero_advantage: ZeroAdvantage = _zero_advantage(config)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the group-relative advantage of each sampled token; see :class:`Algorithm`."""
        rows: list[FloatArray] = []
        for group in groups:
            values = self._group_advantages(group)
            for trajectory, value in zip(group.trajectories, values, strict=True):
                rows += [s.loss_mask.astype(np.float32) * value for s in trajectory.samples]
        return rows

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the clipped, truncated objective; see :class:`Algorithm`."""
        config, mask = self.config, batch.loss_mask
        recomputed = config.proximal == "recompute"
        proximal = batch.signals["proximal_logprobs"] if recomputed else batch.inference_logprobs
        log_ratio = torch.where(mask, trainer_logprobs - proximal, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        tokens = -gain * self._weights(proximal, batch)
        is_ratio = (
            torch.where(mask, trainer_logprobs - batch.inference_logprobs, 0.0).detach().exp()
        )
        metrics = {
            "clip_fraction": (clipped * batch.advantages < ratio * batch.advantages).float(),
            "approx_kl": (ratio - 1 - log_ratio).detach(),
            "is_ratio_mean": is_ratio,
        }
        if config.kl_coef:
            kl = _k3(batch.signals["ref_logprobs"] - trainer_logprobs)
            tokens = tokens + config.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        sums = {name: torch.where(mask, x, 0.0).sum() for name, x in metrics.items()}
        sums["is_ratio_max"] = torch.where(mask, is_ratio, 0.0).max()
        return self._aggregate(torch.where(mask, tokens, 0.0), batch), sums

    def _group_advantages(self, group: Group) -> FloatArray:
        rewards = np.array([t.reward for t in group.trajectories], dtype=np.float64)
        centred = rewards - rewards.mean()
        std = rewards.std()
        if std < _EPS * max(1.0, float(np.abs(rewards).max())):
            return np.zeros(len(rewards), dtype=np.float32)
        scale = std if self.config.normalise == "group_std" else 1.0
        advantages: FloatArray = (centred / scale).astype(np.float32)
        return advantages

    def _weights(self, proximal: torch.Tensor, batch: LossBatch) -> torch.Tensor | float:
        if self.config.proximal == "inference":
            return 1.0
        log_weight = torch.where(batch.loss_mask, proximal - batch.inference_logprobs, 0.0)
        return log_weight.detach().exp().clamp(max=self.tis_cap)

    def _aggregate(self, tokens: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        if self.config.loss_aggregation == "token_mean":
            return tokens.sum() / batch.total_loss_tokens
        if self.config.loss_aggregation == "sample_mean":
            counts = torch.bincount(batch.sample_ids, weights=batch.loss_mask.float())
            tokens = tokens / counts.to(tokens.dtype).clamp(min=1)[batch.sample_ids]
        return tokens.sum() / batch.total_samples


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(trainer || ref) from ``log(ref / trainer)``; never negative."""
    return log_ratio.exp() - log_ratio - 1


def _zero_advantage(config: GRPOConfig) -> ZeroAdvantage:
    if config.zero_advantage == "drop":
        return "drop"
    return "train" if config.kl_coef else "skip"
