"""What is done about tokens that another policy sampled than the one that is trained.

Takes: logprobs of the proximal policy and of the one that sampled. Gives: a weight a token, without
gradient. Never: hides a weight: how many were cut off is counted.

Three policies: the one that sampled (``inference``, some versions old and computed by another
program), the proximal one (``recompute``: the trainer's, before the first update on the batch) and
the current one. The ratio, which is clipped, is current / proximal, the weight

    w = prod_t pi_proximal / pi_inference          of one token, or over the sample (sequence_*)
    *_truncate   min(w, cap)
    *_mask       w where floor <= w <= cap, else 0
    x staleness_discount^staleness

Splitting the proximal policy from the one that sampled is arXiv:2110.00641 (decoupled PPO, section
3) and, for asynchronous RL of language models, arXiv:2505.24298 (AReaL, section 5.2); truncating
the weight is equation 1 of arXiv:1802.01561 (V-trace's rho-bar) and, between the engines of one
run, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Masking tokens outside two bounds is IcePop (arXiv:2510.18855). The discount is in the manner of
arXiv:1511.05950 (staleness-aware SGD), which divides by the staleness.
"""

from __future__ import annotations

import math

import torch

from rollart_algorithms.aggregation import sample_sums
from rollart_algorithms.options import DEFAULT_TIS_CAP, OffPolicyOptions
from rollart_core.contracts.algorithm import LossBatch


def proximal_logprobs(batch: LossBatch, options: OffPolicyOptions) -> torch.Tensor:
    """Return ``[N]`` logprobs of the policy that the ratio is taken against."""
    if options.proximal == "inference":
        return batch.inference_logprobs
    return batch.signals["proximal_logprobs"]


def importance_weights(
    proximal: torch.Tensor, batch: LossBatch, options: OffPolicyOptions
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    """Return ``[N]`` weights (or one for all), and what was cut off of them.

    Args:
        proximal: ``[N]`` logprobs.
        batch: The microbatch.
        options: Says how.
    """
    weights, metrics = _corrected(proximal, batch, options)
    if options.staleness_discount < 1:
        weights = weights * options.staleness_discount ** batch.staleness.to(proximal.dtype)
    return weights, metrics


def _corrected(
    proximal: torch.Tensor, batch: LossBatch, options: OffPolicyOptions
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    if options.proximal == "inference" or options.importance_correction == "none":
        return 1.0, {}
    log_weight = torch.where(batch.loss_mask, proximal - batch.inference_logprobs, 0.0).detach()
    if options.importance_correction.startswith("sequence"):
        log_weight = sample_sums(log_weight, batch)
    if options.importance_correction.endswith("_truncate"):
        cap = options.tis_cap or DEFAULT_TIS_CAP
        cut = {"is_truncated_fraction": (log_weight > math.log(cap)).float()}
        return log_weight.exp().clamp(max=cap), cut
    floor, cap = options.mask_bounds
    weights = log_weight.exp()
    kept = (weights >= floor) & (weights <= cap)
    return torch.where(kept, weights, 0.0), {"is_masked_fraction": (~kept).float()}
