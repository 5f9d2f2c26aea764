"""Per-row facts of a token batch, computed once and used by every layer.

Takes: a :class:`TokenBatch`. Gives: positions, slots and attention work items. Never: touches the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollart_cpu.inference.runner import Int64Array, TokenBatch

ROWS_PER_ITEM = 16
"""Tokens of one attention work item when several threads share the work."""


@dataclass(slots=True)
class Items:
    """Runs of rows that attend in one slot: ``[I]`` each."""

    first: Int64Array
    """Index of the first row."""
    rows: Int64Array
    slots: Int64Array
    positions: Int64Array
    """Position of the first row."""


@dataclass(slots=True)
class Layout:
    """The layout of a batch for the layers."""

    slots: Int64Array
    """``[N]``."""
    positions: Int64Array
    """``[N]``."""
    items: Items
    wanted_rows: Int64Array
    """``[R]``; rows whose logits are wanted."""
    wanted_items: Items
    """The same rows as work items of one row each, numbered from 0."""
    all_wanted: bool
    """Every row is wanted, as in a pure decode step."""


def lay_out(batch: TokenBatch, *, split: bool) -> Layout:
    """Return the layout of a batch.

    Args:
        batch: The tokens.
        split: Whether to cut long segments into several work items.
    """
    num = batch.num_tokens
    ends = np.cumsum(batch.lengths)
    first = ends - batch.lengths
    wanted_rows = np.arange(num) if batch.every_row else ends[batch.wanted] - 1
    positions = np.arange(num) + np.repeat(batch.starts - first, batch.lengths)
    items = Items(first, batch.lengths, batch.slots, batch.starts)
    slots = np.repeat(batch.slots, batch.lengths)
    count = len(wanted_rows)
    last = Items(
        np.arange(count), np.ones(count, np.int64), slots[wanted_rows], positions[wanted_rows]
    )
    if split and num > len(first):
        items = _split(items)
    return Layout(slots, positions, items, wanted_rows, last, all_wanted=count == num)


def _split(items: Items) -> Items:
    pieces = -(-items.rows // ROWS_PER_ITEM)
    offset = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset *= ROWS_PER_ITEM
    return Items(
        np.repeat(items.first, pieces) + offset,
        np.minimum(np.repeat(items.rows, pieces) - offset, ROWS_PER_ITEM),
        np.repeat(items.slots, pieces),
        np.repeat(items.positions, pieces) + offset,
    )
