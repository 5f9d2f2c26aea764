"""What the reports of a batch say of the whole batch.

Takes: the rows of a batch. Gives: numbers by name. Never: imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart_core.training.batch import BatchRow, num_effective_groups


def batch_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return what every report of a batch says of the whole batch."""
    num_groups, num_effective = len({row.group for row in rows}), num_effective_groups(rows)
    staleness = np.array([r.staleness for r in rows] or [0])
    return {
        "zero_advantage_groups": float(num_groups - num_effective),
        "effective_groups": float(num_effective),
        "batch_groups": float(num_groups),
        "sampled_entropy": _sampled_entropy(rows),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }


def _sampled_entropy(rows: Sequence[BatchRow]) -> float:
    """Return the mean of -log p of all sampled tokens, as the engines had it.

    That estimates the entropy of the policy that sampled, over all tokens of the batch: those of
    samples that no forward pass is made for are among them.
    """
    num_tokens = sum(r.sample.num_loss_tokens for r in rows)
    total = sum(
        float(r.sample.inference_logprobs[r.sample.loss_mask].sum(dtype=np.float64)) for r in rows
    )
    return -total / max(1, num_tokens)


def value_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return how much of the returns the critic foretold, before it learned from the batch.

    ``explained_variance`` is ``1 - Var(returns - values) / Var(returns)``: 1 is all, 0 as much as a
    constant would, less than 0 is worse than that.
    """
    if not rows or not {"values", "returns"} <= set(rows[0].signals):
        return {}
    masks = [r.sample.loss_mask for r in rows]
    values, returns = (
        np.concatenate([r.signals[name][m] for r, m in zip(rows, masks, strict=True)])
        for name in ("values", "returns")
    )
    spread_of_returns = float(returns.var())
    if spread_of_returns == 0:
        return {"value_mean": float(values.mean())}
    unexplained = float((returns - values).var()) / spread_of_returns
    return {"value_mean": float(values.mean()), "explained_variance": 1 - unexplained}
