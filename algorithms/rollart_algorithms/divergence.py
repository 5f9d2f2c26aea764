"""The divergence of the policy from the reference, estimated from the sampled tokens.

Takes: log ratios of tokens sampled by ``pi``. Gives: estimates of KL(pi || ref), one per token.
Never: uses more of each distribution than the one sampled token.

With ``l = log(ref / pi)`` (Schulman 2020, "Approximating KL divergence"):

    k1 = -l                   unbiased; as a loss its gradient is 0 on average
    k2 = l^2 / 2              slightly biased; as a loss its gradient is that of the KL on average
    k3 = exp(l) - l - 1       unbiased, never negative; arXiv:2402.03300 (GRPO), equation 4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollart_algorithms.options import KlEstimator, LossOptions
from rollart_core.contracts.algorithm import Signals
from rollart_core.types import FloatArray, Group


def kl_tokens(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Return ``[N]`` estimates.

    Args:
        log_ratio: ``[N]``, ``log(ref / pi)``.
        estimator: The estimator.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - log_ratio - 1


def kl_penalties(
    groups: Sequence[Group], signals: Signals, options: LossOptions
) -> list[FloatArray] | None:
    """Return the penalties to subtract from the reward, ``[T]`` per sample; None if there are none.

    The divergence is that of the policy that sampled: it uses the logprobs of the engine.

    Args:
        groups: The groups of the samples.
        signals: Signals with ``ref_logprobs``.
        options: Options with the weight of the penalty and its estimator.
    """
    if not options.kl_coef or options.kl_in != "reward":
        return None
    samples = [s for g in groups for s in g.samples]
    rows: list[FloatArray] = []
    for sample, ref in zip(samples, signals["ref_logprobs"], strict=True):
        log_ratio = torch.from_numpy(np.asarray(ref - sample.inference_logprobs))
        kl = kl_tokens(log_ratio, options.kl_estimator).numpy()
        rows.append(np.where(sample.loss_mask, options.kl_coef * kl, 0).astype(np.float32))
    return rows
