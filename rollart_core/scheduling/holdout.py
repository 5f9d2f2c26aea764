"""Which tasks of a split are held out for validation, where the environment declares no such split.

    tasks 0 1 2 3 4 5 6 7 ...                 a hash of each task, or of its cluster
      --> held: 3 ...                         validation plays them
      --> kept: 0 1 2 4 5 6 7 ...             training and the warm start have these

Takes: how many tasks a split has, and which of them are alike. Gives: two disjoint lists of its
indices. Never: depends on the seed of the run, so that all seeds of an experiment validate on the
same tasks; or keeps a task of a cluster that another task is held out of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, zip_longest
from math import ceil

from rollart_core.errors import ConfigError

LARGEST_SHARE = 0.2
"""Most tasks of a split that are not kept."""
LEAST_CLUSTERS = 0.1
"""Least share of the clusters that validation tasks are of, so that they speak for the others."""
BLOCK = 10
"""Of a split without end one task in so many is held out."""


@dataclass(frozen=True, slots=True)
class Holdout:
    """The two lists; each is a function from 0, 1, 2, ... to an index of the split."""

    num_held: int | None
    """How many tasks are held out; None: without end."""
    num_kept: int | None
    """How many others there are, without those that are alike; None: without end."""
    held: Callable[[int], int]
    """The index of the i-th task that is held out."""
    kept: Callable[[int], int]
    """The index of the i-th task that is kept."""


def hold_out(
    env_id: str, split: str, num_tasks: int | None, wanted: int, clusters: Sequence[str] | None
) -> Holdout:
    """Choose the tasks of a split that are held out.

    Args:
        env_id: The environment's id.
        split: The split.
        num_tasks: How many tasks it has; None: without end.
        wanted: How many to hold out; there are fewer where that would take more than
            ``LARGEST_SHARE`` of the split.
        clusters: A name for each task, the same for those that are alike. None: each is alone.

    Raises:
        ConfigError: When nothing can be held out.
    """
    name = f"{env_id}/{split}"
    if num_tasks is None:
        return _without_end(name)
    members: dict[str, list[int]] = {}
    for index in range(num_tasks):
        cluster = clusters[index] if clusters is not None else str(index)
        members.setdefault(cluster, []).append(index)
    if len(members) < 2:
        what = f"{num_tasks} task(s)" if clusters is None else f"{len(members)} cluster(s) of tasks"
        raise ConfigError(
            f"evaluation.every_batches: split {split!r} of {env_id} has {what}, and validation "
            "tasks cannot be taken out of it: name another evaluation.validation_split"
        )
    chosen = _chosen(name, members, wanted)
    left_out = {index for cluster in chosen for index in members[cluster]}
    kept = sorted(set(range(num_tasks)) - left_out)
    held = sorted(islice(_one_of_each(members[cluster] for cluster in chosen), wanted))
    return Holdout(len(held), len(kept), held.__getitem__, kept.__getitem__)


def _chosen(name: str, members: Mapping[str, Sequence[int]], wanted: int) -> list[str]:
    """Return clusters, in the order of their hashes, until they and their tasks are enough."""
    limit = int(LARGEST_SHARE * sum(map(len, members.values())))
    least = min(wanted, ceil(LEAST_CLUSTERS * len(members)))
    chosen: list[str] = []
    num_tasks = 0
    ordered = sorted(members, key=lambda cluster: (_digest(f"{name}/{cluster}"), cluster))
    for cluster in ordered:
        if num_tasks >= wanted and len(chosen) >= least:
            break
        if num_tasks + len(members[cluster]) <= limit:
            chosen.append(cluster)
            num_tasks += len(members[cluster])
    return chosen or [min(ordered, key=lambda cluster: len(members[cluster]))]


def _one_of_each(clusters: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the first task of each cluster, then the second of each, and so on."""
    for row in zip_longest(*clusters):
        yield from (index for index in row if index is not None)


def _without_end(name: str) -> Holdout:
    """Hold out one task of each block, at a place that the hash of the block chooses."""

    def held(i: int) -> int:
        return i * BLOCK + _digest(f"{name}/{i}") % BLOCK

    def kept(i: int) -> int:
        block, offset = divmod(i, BLOCK - 1)
        index = block * BLOCK + offset
        return index + (index >= held(block))

    return Holdout(None, None, held, kept)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(f"validation/{text}".encode(), digest_size=8).digest(), "little")
