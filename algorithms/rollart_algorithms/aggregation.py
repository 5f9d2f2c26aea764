"""Aggregate the losses of tokens into one number, in the ways that the literature names.

Takes: ``[N]`` losses of a microbatch, 0 where masked. Gives: its share of the minibatch's loss.
Never: divides by counts of the microbatch. The shares add up however the minibatch is split.

With samples ``i`` of ``n_i`` loss tokens and ``B`` samples in total:

    token_mean        sum_i sum_t l_it / sum_i n_i            arXiv:2503.14476 (DAPO), section 3.3
    sample_mean       1/B sum_i 1/n_i sum_t l_it              arXiv:2402.03300 (GRPO), equation 3
    sample_sum        1/B sum_i sum_t l_it                    arXiv:2503.20783 (Dr. GRPO), section 3
    sample_sum_norm   1/B sum_i 1/norm_tokens sum_t l_it      the same, with its code's constant
    trajectory_mean   1/B' sum_j 1/n_j sum_t l_jt             sample_mean over whole trajectories
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollart_algorithms.options import Aggregation
from rollart_core.contracts.algorithm import LossBatch
from rollart_core.types import FloatArray, Group

TRAJECTORY_TOKENS = "trajectory_tokens"
"""The target that ``trajectory_mean`` divides by: the loss tokens of the token's trajectory."""


def aggregate(
    tokens: torch.Tensor, batch: LossBatch, how: Aggregation, norm_tokens: int | None = None
) -> torch.Tensor:
    """Return this microbatch's share of the loss.

    Args:
        tokens: ``[N]``, 0 where masked.
        batch: The microbatch.
        how: One of the methods in the module docstring.
        norm_tokens: The constant of ``sample_sum_norm``.
    """
    match how:
        case "token_mean":
            return tokens.sum() / batch.total_loss_tokens
        case "trajectory_mean":
            counts = batch.signals[TRAJECTORY_TOKENS].clamp(min=1)
            return (tokens / counts).sum() / batch.total_trajectories
        case "sample_mean":
            tokens = tokens / tokens_of_sample(batch, tokens.dtype)
        case "sample_sum_norm":
            tokens = tokens / float(norm_tokens or 1)
    return tokens.sum() / batch.total_samples


def sample_sums(values: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """Return ``[N]``: for each token, the sum of ``values`` ``[N]`` over its sample."""
    sums = values.new_zeros(batch.total_samples).index_add(0, batch.sample_ids, values)
    return sums[batch.sample_ids]


def tokens_of_sample(batch: LossBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[N]``: for each token, the number of loss tokens of its sample, at least 1."""
    return sample_sums(batch.loss_mask.to(dtype), batch).clamp(min=1)


def trajectory_tokens(groups: Sequence[Group]) -> list[FloatArray]:
    """Return one ``[T]`` per sample: the number of loss tokens of its trajectory, at each token."""
    return [
        np.full(sample.num_tokens, trajectory.num_loss_tokens, dtype=np.float32)
        for group in groups
        for trajectory in group.trajectories
        for sample in trajectory.samples
    ]
