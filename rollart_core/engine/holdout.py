"""Which tasks of a split are held out for validation, where the environment declares no such split.

    tasks 0 1 2 3 4 5 6 7 ...                 a hash of each task, or of its cluster
      --> held out: 3 ...                     validation plays them
      --> kept:     0 1 2 4 5 6 7 ...         training and the warm start have all others

Takes: how many tasks a split has, and which of them are alike. Gives: two disjoint lists of its
indices. Never: depends on the seed of the run, so that all seeds of an experiment validate on the
same tasks; or separates the tasks of one cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rollart_core.errors import ConfigError

LARGEST_SHARE = 0.2
"""Most of a split that is held out."""
BLOCK = 10
"""Of a split without end one task in so many is held out."""


@dataclass(frozen=True, slots=True)
class Holdout:
    """The two lists; each is a function from 0, 1, 2, ... to an index of the split."""

    num_held: int | None
    """How many tasks are held out; None: without end."""
    num_kept: int | None
    """How many are not; None: without end."""
    held: Callable[[int], int]
    """The index of the i-th task that is held out."""
    kept: Callable[[int], int]
    """The index of the i-th task that is not."""


def hold_out(
    env_id: str, split: str, num_tasks: int | None, wanted: int, clusters: Sequence[str] | None
) -> Holdout:
    """Choose the tasks of a split that are held out.

    Args:
        env_id: The environment's id.
        split: The split.
        num_tasks: How many tasks it has; None: without end.
        wanted: How many to hold out; more where the last cluster has more, fewer where that would
            be more than ``LARGEST_SHARE`` of the split.
        clusters: A name for each task; tasks with the same name go together. None: each is alone.

    Raises:
        ConfigError: When nothing can be held out.
    """
    name = f"{env_id}/{split}"
    if num_tasks is None:
        return _without_end(name)
    if clusters is not None and len(clusters) != num_tasks:
        raise ConfigError(
            f"task_clusters({split!r}) of {env_id} returns {len(clusters)} names, and "
            f"num_tasks({split!r}) is {num_tasks}: it must return one for each task"
        )
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
    held = sorted(_chosen(name, members, wanted))
    kept = sorted(set(range(num_tasks)) - set(held))
    return Holdout(len(held), len(kept), held.__getitem__, kept.__getitem__)


def _chosen(name: str, members: dict[str, list[int]], wanted: int) -> list[int]:
    """Return the tasks of clusters, in the order of their hashes, until there are enough."""
    limit = int(LARGEST_SHARE * sum(map(len, members.values())))
    ordered = sorted(members, key=lambda cluster: (_digest(f"{name}/{cluster}"), cluster))
    chosen: list[int] = []
    for cluster in ordered:
        if len(chosen) < wanted and len(chosen) + len(members[cluster]) <= limit:
            chosen += members[cluster]
    return chosen or min((members[cluster] for cluster in ordered), key=len)


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
