"""The sampled tokens of one trajectory in the order in which they were sampled.

Takes: rows of its samples. Gives: one row of all sampled tokens, turn by turn, and the reverse.
Never: assumes that the order of samples is the order of time. A sub-agent or a branch is its own
sample, and its turns can lie between those of another sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart_core.types import BoolArray, FloatArray, Trajectory

Row = npt.NDArray[np.float64]
"""``[K]``, the sampled tokens of a trajectory."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the ``K`` sampled tokens of a trajectory were sampled."""

    masks: tuple[BoolArray, ...]
    """``[T]`` per sample, True at its sampled tokens."""
    order: npt.NDArray[np.intp]
    """``[K]``: tokens in the order of turns, as indices into the tokens of all samples in a row."""
    turns: npt.NDArray[np.int32]
    """``[K]``: the turn of each token, in ascending order."""
    is_end: BoolArray
    """``[K]``: True at the last token of each turn."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Timeline:
        """Return the timeline of a trajectory with at least one sampled token."""
        by_sample = np.concatenate([s.turn_ids[s.loss_mask] for s in trajectory.samples])
        order = np.argsort(by_sample, kind="stable")
        turns = by_sample[order]
        is_end = np.append(turns[1:] != turns[:-1], True)
        return cls(tuple(s.loss_mask for s in trajectory.samples), order, turns, is_end)

    def joined(self, rows: Sequence[FloatArray]) -> Row:
        """Return ``[K]``, in the order of turns, from one ``[T]`` per sample."""
        given = [row[mask] for row, mask in zip(rows, self.masks, strict=True)]
        return np.concatenate(given)[self.order].astype(np.float64)

    def parted(self, values: Row) -> list[FloatArray]:
        """Return one ``[T]`` per sample, 0 at unsampled tokens, from ``[K]`` in turn order."""
        by_sample = np.empty_like(values)
        by_sample[self.order] = values
        rows, start = [], 0
        for mask in self.masks:
            row = np.zeros(len(mask), dtype=np.float32)
            stop = start + int(mask.sum())
            row[mask] = by_sample[start:stop]
            rows.append(row)
            start = stop
        return rows
