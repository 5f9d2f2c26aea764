"""Normalisation over all tokens of a batch.

Takes: rows of tokens. Gives: the rows with mean 0 and standard deviation 1 over the sampled tokens.
Never: counts a masked token.

    A_t = (x_t - mean(x)) / std(x)                  arXiv:2501.03262 (REINFORCE++)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart_algorithms.group_advantages import is_flat
from rollart_core.types import BoolArray, FloatArray


def whitened(rows: Sequence[FloatArray], masks: Sequence[BoolArray]) -> list[FloatArray]:
    """Return rows normalised over their sampled tokens; all 0 if those are all equal.

    Args:
        rows: One ``[T]`` per sample.
        masks: One ``[T]`` per sample, True at sampled tokens.
    """
    live = [np.asarray(r, dtype=np.float64)[m] for r, m in zip(rows, masks, strict=True)]
    values = np.concatenate(live) if live else np.zeros(0)
    if not len(values) or is_flat(values):
        return [np.zeros(len(row), dtype=np.float32) for row in rows]
    mean, std = values.mean(), values.std()
    return [
        np.where(mask, (row - mean) / std, 0).astype(np.float32)
        for row, mask in zip(rows, masks, strict=True)
    ]
