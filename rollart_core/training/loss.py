"""The input of the algorithm's loss as packed tensors, and the sums of its metrics.

Takes: the rows of a microbatch, and the results of loss and model. Gives: a :class:`LossBatch`, and
means over all microbatches and ranks. Never: depends on an algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollart_core.contracts.algorithm import LossBatch
from rollart_core.training import distributed
from rollart_core.training.batch import BatchRow, Minibatch


def loss_batch(
    minibatch: Minibatch, members: Sequence[int], policy_version: int, device: torch.device
) -> LossBatch:
    """Return some rows of a minibatch, packed; ``N`` is the sum of their lengths.

    Args:
        minibatch: The minibatch.
        members: Indices of the rows.
        policy_version: The trainer's version, for staleness.
        device: The device of the tensors.
    """
    rows = [minibatch.rows[i] for i in members]
    mask = np.concatenate([r.sample.loss_mask for r in rows])
    versions = np.concatenate([r.sample.policy_versions for r in rows])
    lengths = [r.sample.num_tokens for r in rows]

    def masked(arrays: list[np.ndarray]) -> Tensor:
        values = np.where(mask, np.concatenate(arrays), 0).astype(np.float32)
        return torch.from_numpy(values).to(device)

    staleness = np.where(mask, policy_version - versions, 0).astype(np.int64)
    turns = np.where(mask, np.concatenate([r.sample.turn_ids for r in rows]), -1)
    trajectories = np.array([r.trajectory for r in rows], dtype=np.int64)
    return LossBatch(
        loss_mask=torch.from_numpy(mask).to(device),
        advantages=masked([r.advantages for r in rows]),
        inference_logprobs=masked([r.sample.inference_logprobs for r in rows]),
        sample_ids=torch.from_numpy(np.repeat(np.array(members), lengths)).to(device),
        staleness=torch.from_numpy(staleness).to(device),
        total_loss_tokens=minibatch.total_loss_tokens,
        total_samples=minibatch.total_samples,
        signals={name: masked([r.signals[name] for r in rows]) for name in _common(rows)},
        turn_ids=torch.from_numpy(turns.astype(np.int64)).to(device),
        trajectory_ids=torch.from_numpy(np.repeat(trajectories, lengths)).to(device),
        total_trajectories=minibatch.total_trajectories,
    )


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return ``[N]`` with ``values`` ``[K]`` at the loss tokens, 0 elsewhere; differentiable."""
    at = loss_mask.nonzero().squeeze(1)
    return values.new_zeros(len(loss_mask)).index_copy(0, at, values)


def mismatch_sums(logprobs: Tensor, part: LossBatch) -> dict[str, Tensor]:
    """Return sums and maxima of the differences between trainer's and engine's logprobs ``[N]``.

    Fresh tokens are tokens that the newest policy version sampled.
    """
    mask = part.loss_mask
    diff = (logprobs.detach() - part.inference_logprobs)[mask].abs()
    fresh = part.staleness[mask] == 0
    return {
        "loss_tokens": mask.sum(),
        "logprob_diff_mean": diff.sum(),
        "logprob_diff_max": diff.max(),
        "fresh_tokens": fresh.sum(),
        "logprob_diff_fresh_mean": torch.where(fresh, diff, 0.0).sum(),
        "logprob_diff_fresh_max": torch.where(fresh, diff, 0.0).max(),
        "token_staleness_mean": part.staleness.sum(),
    }


class MetricSums:
    """Sums the metrics of one minibatch over microbatches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor], *, is_real: bool) -> None:
        """Add one microbatch: sums, and maxima (names ending in ``_max``).

        A microbatch that is not real adds only its names, so that all ranks reduce the same
        metrics.
        """
        for name, metric in metrics.items():
            value = metric.detach().double()
            if name.endswith("_max"):
                value = value if is_real else torch.full_like(value, -torch.inf)
                self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
            else:
                value = value if is_real else torch.zeros_like(value)
                self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value

    def finish(self) -> dict[str, float]:
        """Return means over loss tokens and maxima, over all ranks."""
        sums = self._reduced(self._sums, distributed.all_sum)
        maxima = self._reduced(self._maxima, distributed.all_max)
        tokens, fresh = sums.pop("loss_tokens", 0.0), sums.pop("fresh_tokens", 0.0)
        loss = sums.pop("loss", 0.0)
        fresh_diff = sums.pop("logprob_diff_fresh_mean", 0.0)
        means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
        return {
            "loss": loss,
            **means,
            **_effective_sample_size(means),
            **maxima,
            "logprob_diff_fresh_mean": fresh_diff / max(fresh, 1.0),
            "loss_tokens": tokens,
        }

    def _reduced(self, values: dict[str, Tensor], over_ranks: object) -> dict[str, float]:
        if not values:
            return {}
        assert callable(over_ranks)
        stacked = over_ranks(torch.stack(list(values.values())))
        return dict(zip(values, stacked.tolist(), strict=True))


def _effective_sample_size(means: Mapping[str, float]) -> dict[str, float]:
    """Return the effective sample size as a share of the loss tokens; empty without weights.

    It is ``(sum w)^2 / (n sum w^2)`` (Kish 1965, "Survey Sampling"): 1 if all weights are equal.
    """
    mean, square = means.get("is_weight_mean"), means.get("is_weight_sq_mean")
    if mean is None or not square:
        return {}
    return {"effective_sample_size": mean * mean / square}


def _common(rows: Sequence[BatchRow]) -> list[str]:
    """Return the signals that every row has."""
    return sorted(set.intersection(*(set(r.signals) for r in rows)))
