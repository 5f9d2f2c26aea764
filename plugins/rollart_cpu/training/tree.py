"""Prefix trees: every distinct prefix of a microbatch goes through the model once.

Siblings share their first prompt, and often their first turns too. What a causal model computes at
a token depends on the tokens before it and on nothing else, so equal prefixes can be computed
once; gradients of all rows that share them add up, and the result is the same.

Takes: token rows. Gives: the distinct nodes, and an attention plan over them on numpy. Never:
imports torch, or depends on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart_core.types import IntArray

Index = npt.NDArray[np.int64]

BLOCK = 64
"""Queries an attention item; keys are padded to a multiple of it."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The distinct prefixes of some rows. Node ``n`` stands for one prefix, by its last token."""

    token_ids: Index
    """``[U]``."""
    positions: Index
    """``[U]``; depth, from 0."""
    paths: tuple[Index, ...]
    """For each row its node ids, ``[T]``."""
    owned_from: tuple[int, ...]
    """For each row the position from which its nodes are its own; before it they are another's."""

    @property
    def num_nodes(self) -> int:
        """The number of tokens that go through the model."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Attention items of like size; ``n`` items of ``Q`` query and ``K`` key slots."""

    queries: Index
    """``[n, Q]`` node ids, -1 where padded."""
    keys: Index
    """``[n, K]`` node ids, padded with 0: padding lies in the future of every real query."""
    masked: npt.NDArray[np.bool_]
    """``[n or 1, Q, M]``: True where the query must not see one of the last ``M`` keys."""


def sort_order(rows: Sequence[IntArray]) -> list[int]:
    """Return the rows' indices in lexicographic order, so that those that share stand together."""
    return sorted(range(len(rows)), key=lambda i: rows[i].astype(">i4").tobytes())


def shared_prefix(a: IntArray, b: IntArray) -> int:
    """Return how many leading tokens two rows share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def pack_shared(rows: Sequence[IntArray], budget: int) -> list[list[int]]:
    """Return bins of indices, each of at most ``budget`` distinct prefixes, in lexicographic order.

    A row above the budget gets its own bin.
    """
    bins: list[list[int]] = []
    used, last = budget, -1
    for i in sort_order(rows):
        new = len(rows[i]) - (shared_prefix(rows[last], rows[i]) if last >= 0 else 0)
        if not bins or used + new > budget:
            bins.append([])
            used, new = 0, len(rows[i])
        bins[-1].append(i)
        used, last = used + new, i
    return bins


def build(rows: Sequence[IntArray]) -> PrefixTree:
    """Return the prefix tree of the rows (at least one, none empty)."""
    paths: list[Index] = [np.empty(0, np.int64)] * len(rows)
    owned_from = [0] * len(rows)
    tokens: list[IntArray] = []
    positions: list[Index] = []
    size, last = 0, -1
    for i in sort_order(rows):
        shared = shared_prefix(rows[last], rows[i]) if last >= 0 else 0
        new = len(rows[i]) - shared
        own = np.arange(size, size + new)
        paths[i] = np.concatenate([paths[last][:shared], own]) if shared else own
        owned_from[i], size, last = shared, size + new, i
        tokens.append(rows[i][shared:])
        positions.append(np.arange(shared, shared + new))
    return PrefixTree(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(positions),
        tuple(paths),
        tuple(owned_from),
    )


def full_plan(tree: PrefixTree) -> list[Bucket]:
    """Return buckets in which every node queries once; blocks are aligned to positions.

    Query block ``b`` covers positions ``[b BLOCK, (b + 1) BLOCK)`` and sees keys up to its own
    end, so only its last ``BLOCK`` keys need a mask, and that is the same triangle everywhere.
    """
    by_block: dict[int, list[int]] = {}
    for i, path in enumerate(tree.paths):
        if tree.owned_from[i] < len(path):
            for b in range(tree.owned_from[i] // BLOCK, (len(path) - 1) // BLOCK + 1):
                by_block.setdefault(b, []).append(i)
    triangle = np.triu(np.ones((1, BLOCK, BLOCK), dtype=bool), k=1)
    return [_block_bucket(tree, b, items, triangle) for b, items in sorted(by_block.items())]


def subset_plan(tree: PrefixTree, wanted: Index) -> list[Bucket]:
    """Return buckets in which only the ``wanted`` nodes query (each once)."""
    is_wanted = np.zeros(tree.num_nodes, dtype=bool)
    is_wanted[wanted] = True
    by_size: dict[int, list[tuple[int, Index]]] = {}
    for i, path in enumerate(tree.paths):
        start = tree.owned_from[i]
        at = start + np.flatnonzero(is_wanted[path[start:]])
        if len(at):
            by_size.setdefault(int(at[-1]) // (2 * BLOCK), []).append((i, at))
    return [_subset_bucket(tree, items) for _, items in sorted(by_size.items())]


def _block_bucket(
    tree: PrefixTree, block: int, items: list[int], triangle: npt.NDArray[np.bool_]
) -> Bucket:
    start, stop = block * BLOCK, (block + 1) * BLOCK
    queries = np.full((len(items), BLOCK), -1, dtype=np.int64)
    keys = np.zeros((len(items), stop), dtype=np.int64)
    for n, i in enumerate(items):
        path, first = tree.paths[i], max(tree.owned_from[i], start)
        own = path[first:stop]
        queries[n, first - start : first - start + len(own)] = own
        keys[n, : len(path[:stop])] = path[:stop]
    return Bucket(queries, keys, triangle)


def _subset_bucket(tree: PrefixTree, items: list[tuple[int, Index]]) -> Bucket:
    num_queries = max(len(at) for _, at in items)
    num_keys = max(int(at[-1]) + 1 for _, at in items)
    queries = np.full((len(items), num_queries), -1, dtype=np.int64)
    at_positions = np.zeros((len(items), num_queries), dtype=np.int64)
    keys = np.zeros((len(items), num_keys), dtype=np.int64)
    for n, (i, at) in enumerate(items):
        path = tree.paths[i][:num_keys]
        queries[n, : len(at)] = tree.paths[i][at]
        at_positions[n, : len(at)] = at
        keys[n, : len(path)] = path
    masked = np.arange(num_keys)[None, None, :] > at_positions[:, :, None]
    return Bucket(queries, keys, masked)
