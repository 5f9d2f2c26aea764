"""Between rows and the algorithm's loss: packed tensors in, sums of metrics out.

Takes: the rows of a microbatch, and what loss and model said of them. Gives: a
:class:`LossBatch`, and means over all microbatches and ranks. Never: knows an algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollart_core.contracts.algorithm import LossBatch
from rollart_core.train import distributed
from rollart_core.train.batch import Minibatch, Row


def loss_batch(
    minibatch: Minibatch, members: Sequence[int], policy_version: int, device: torch.device
) -> LossBatch:
    """Return some rows of a minibatch, packed; ``N`` is the sum of their lengths.

    Args:
        minibatch: The whole.
        members: Which of its rows.
        policy_version: The trainer's version, for staleness.
        device: Where the tensors go.
    """
    rows = [minibatch.rows[i] for i in members]
    mask = np.concatenate([r.sample.loss_mask for r in rows])
    versions = np.concatenate([r.sample.policy_versions for r in rows])
    lengths = [r.sample.num_tokens for r in rows]

    def masked(arrays: list[np.ndarray]) -> Tensor:
        values = np.where(mask, np.concatenate(arrays), 0).astype(np.float32)
        return torch.from_numpy(values).to(device)

    staleness = np.where(mask, policy_version - versions, 0).astype(np.int64)
    return LossBatch(
        loss_mask=torch.from_numpy(mask).to(device),
        advantages=masked([r.advantages for r in rows]),
        inference_logprobs=masked([r.sample.inference_logprobs for r in rows]),
        sample_ids=torch.from_numpy(np.repeat(np.array(members), lengths)).to(device),
        staleness=torch.from_numpy(staleness).to(device),
        total_loss_tokens=minibatch.total_loss_tokens,
        total_samples=minibatch.total_samples,
        signals={name: masked([r.signals[name] for r in rows]) for name in _common(rows)},
    )


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return ``[N]``: ``values`` ``[K]`` at the loss tokens, 0 elsewhere; differentiable."""
    at = loss_mask.nonzero().squeeze(1)
    return values.new_zeros(len(loss_mask)).index_copy(0, at, values)


class MetricSums:
    """Adds up the metrics of one minibatch over microbatches and ranks.

    Args:
        device: Of the tensors that are added.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._device = device

    def add(
        self,
        loss: Tensor,
        metrics: Mapping[str, Tensor],
        logprobs: Tensor,
        entropy: Tensor,
        part: LossBatch,
    ) -> None:
        """Add one microbatch: its share of the loss, the algorithm's metrics and the mismatch."""
        mask = part.loss_mask
        diff = (logprobs.detach() - part.inference_logprobs)[mask].abs()
        fresh = part.staleness[mask] == 0
        everything = {
            **metrics,
            "loss": loss.detach(),
            "loss_tokens": mask.sum(),
            "entropy": entropy.sum(),
            "logprob_diff_mean": diff.sum(),
            "logprob_diff_max": diff.max(),
            "fresh_tokens": fresh.sum(),
            "logprob_diff_fresh_mean": (diff * fresh).sum(),
            "logprob_diff_fresh_max": (diff * fresh).max(),
            "token_staleness_mean": part.staleness.sum(),
        }
        for name, value in everything.items():
            self._add(name, value.detach().double())

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
            **maxima,
            "logprob_diff_fresh_mean": fresh_diff / max(fresh, 1.0),
            "loss_tokens": tokens,
        }

    def _add(self, name: str, value: Tensor) -> None:
        if name.endswith("_max"):
            before = self._maxima.get(name)
            self._maxima[name] = value if before is None else torch.maximum(before, value)
        else:
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value

    def _reduced(self, values: dict[str, Tensor], over_ranks: object) -> dict[str, float]:
        if not values:
            return {}
        assert callable(over_ranks)
        stacked = over_ranks(torch.stack(list(values.values())))
        return dict(zip(values, stacked.tolist(), strict=True))


def _common(rows: Sequence[Row]) -> list[str]:
    """Return the signals that every row has."""
    return sorted(set.intersection(*(set(r.signals) for r in rows)))
