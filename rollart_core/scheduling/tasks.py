"""Task sources: an endless, seeded, shuffled order, fixed lists, and validation holdouts.

    tasks 0 1 2 3 4 5 6 7 ...                 a hash of each task, or of its cluster
      --> held: 3 ...                         validation uses these
      --> kept: 0 1 2 4 5 6 7 ...             training and the warm start use these

Tasks are held out of a split if the environment declares no validation split.

Takes: an env id, a split, its number of tasks, the clusters of similar tasks, and a seed. Gives:
:class:`Task` records, and two disjoint lists of a split's indices. Never: opens an environment. The
same arguments give the same order on every machine and Python version; the holdout does not depend
on the seed of the run, so that all seeds of an experiment validate on the same tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice, zip_longest
from math import ceil
from typing import Any, Literal, TypeAlias

import numpy as np

from rollart_core.errors import ConfigError
from rollart_core.types import Task

TaskSeeds: TypeAlias = Literal["by_split", "by_index"]
"""What the seed of a task depends on besides the seed of the run: its split and index, or its
index alone, as in runs of earlier releases."""

LARGEST_SHARE = 0.2
"""Maximum share of the tasks of a split that are held out."""
LEAST_CLUSTERS = 0.1
"""Minimum share of the clusters that validation covers, so that it represents the others."""
BLOCK = 10
"""In a split without end, one task of each block of this size is held out."""


@dataclass(frozen=True, slots=True)
class TaskSourceState:
    """The position of a task source, as plain values for JSON."""

    position: int
    """Number of tasks drawn so far; requeued tasks are not counted again."""
    requeued: tuple[Task, ...] = ()
    """Requeued tasks, which come first, in this order."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Additional state of a curriculum."""


class TaskSource:
    """Endless tasks of one split: each epoch is a new permutation of all its indices."""

    def __init__(
        self,
        env_id: str,
        split: str,
        num_tasks: int | None,
        seed: int,
        *,
        task_seeds: TaskSeeds = "by_split",
        index_of: Callable[[int], int] | None = None,
    ) -> None:
        """Start at the first task.

        Args:
            env_id: The environment.
            split: The split.
            num_tasks: The number of tasks of the split. If None, it has no end, and the order is
                0, 1, 2, ...
            seed: The seed of the run.
            task_seeds: What the seeds of the tasks depend on.
            index_of: If some tasks of the split are excluded, returns the index of the i-th of the
                ``num_tasks`` others.

        Raises:
            ValueError: If the split is empty.
        """
        _check_not_empty(env_id, split, num_tasks)
        self._env_id = env_id
        self._split = split
        self._num_tasks = num_tasks
        self._seed = seed
        self._task_seeds = task_seeds
        self._index_of = index_of or _itself
        self._position = 0
        self._requeued: deque[Task] = deque()
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> Task:
        """Return the next task; requeued ones come first."""
        if self._requeued:
            return self._requeued.popleft()
        index = self._index_at(self._position)
        self._position += 1
        return self._task(self._index_of(index))

    def requeue(self, task: Task) -> None:
        """Put a task back; it is returned before all new tasks."""
        self._requeued.append(task)

    def given(self, task: Task) -> None:
        """Skip a task that was drawn before; the order is always the same."""
        self.next()

    def state(self) -> TaskSourceState:
        """Return the current position as plain values."""
        return TaskSourceState(self._position, tuple(self._requeued))

    def restore(self, state: TaskSourceState) -> None:
        """Continue from ``state``."""
        self._position = state.position
        self._requeued = deque(state.requeued)

    def _index_at(self, position: int) -> int:
        if self._num_tasks is None:
            return position
        epoch, offset = divmod(position, self._num_tasks)
        if epoch != self._epoch:
            self._order = _permutation(self._num_tasks, self._seed, self._split, epoch)
            self._epoch = epoch
        return self._order[offset]

    def _task(self, index: int) -> Task:
        seed = task_seed(self._seed, self._split, index, self._task_seeds)
        return Task(self._env_id, self._split, index, seed)


def held_out_tasks(
    env_id: str,
    split: str,
    n: int,
    seed: int,
    *,
    num_tasks: int | None = None,
    task_seeds: TaskSeeds = "by_split",
    index_of: Callable[[int], int] | None = None,
) -> list[Task]:
    """Return ``n`` tasks for evaluation, always the same; none repeats before all were used.

    Args:
        env_id: The environment.
        split: The split.
        n: The number of tasks to return.
        seed: The seed of the run.
        num_tasks: The number of tasks of the split. If None, it has no end.
        task_seeds: What the seeds of the tasks depend on.
        index_of: As in :class:`TaskSource`.

    Raises:
        ValueError: If the split is empty.
    """
    _check_not_empty(env_id, split, num_tasks)
    numbers = count() if num_tasks is None else _cycle(num_tasks, seed, split)
    indices = map(index_of or _itself, numbers)
    return [
        Task(env_id, split, i, task_seed(seed, split, i, task_seeds)) for i in islice(indices, n)
    ]


def task_seed(seed: int, split: str, index: int, task_seeds: TaskSeeds = "by_split") -> int:
    """Return the 31-bit seed of a task, a function of the run's seed, the split and the index.

    An environment that draws its tasks only from this seed has different tasks in each split. (Two
    tasks have the same seed by chance with a probability of 1 in 2**31.)

    Args:
        seed: The seed of the run.
        split: The split.
        index: The task's index within the split.
        task_seeds: ``by_index`` ignores the split, as earlier releases did: task ``i`` then has the
            same seed in all splits.
    """
    path = f"{split}/{index}" if task_seeds == "by_split" else f"{index}"
    return _digest(f"task/{seed}/{path}") & 0x7FFF_FFFF


def _cycle(num_tasks: int, seed: int, split: str) -> Iterator[int]:
    epoch = 0
    while True:
        yield from _permutation(num_tasks, seed, split, epoch)
        epoch += 1


def _permutation(n: int, seed: int, split: str, epoch: int) -> list[int]:
    # Sorting by keys from PCG64's raw words does not depend on the implementation of a shuffle.
    words = np.random.PCG64(_digest(f"order/{seed}/{split}/{epoch}")).random_raw(n)
    return [int(i) for i in np.argsort(words, kind="stable")]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _itself(index: int) -> int:
    return index


def _check_not_empty(env_id: str, split: str, num_tasks: int | None) -> None:
    if num_tasks is not None and num_tasks < 1:
        raise ValueError(f"split {split!r} of {env_id} has {num_tasks} tasks; it needs at least 1")


@dataclass(frozen=True, slots=True)
class Holdout:
    """The held-out and the kept tasks; each maps 0, 1, 2, ... to an index of the split."""

    num_held: int | None
    """Number of held-out tasks; None if the split has no end."""
    num_kept: int | None
    """Number of kept tasks, without those in held-out clusters; None if the split has no end."""
    held: Callable[[int], int]
    """Returns the index of the i-th held-out task."""
    kept: Callable[[int], int]
    """Returns the index of the i-th kept task."""


def hold_out(
    env_id: str, split: str, num_tasks: int | None, wanted: int, clusters: Sequence[str] | None
) -> Holdout:
    """Choose the held-out tasks of a split.

    Args:
        env_id: The environment's id.
        split: The split.
        num_tasks: The number of tasks of the split. If None, it has no end.
        wanted: The number of tasks to hold out. Fewer are held out if this would exceed
            ``LARGEST_SHARE`` of the split.
        clusters: The cluster name of each task; similar tasks have the same name. If None, each
            task is its own cluster.

    Raises:
        ConfigError: If no task can be held out.
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
            f"evaluation.every_batches: split {split!r} of {env_id} has {what}; validation tasks "
            "cannot be held out of it: name another evaluation.validation_split"
        )
    chosen = _chosen(name, members, wanted)
    left_out = {index for cluster in chosen for index in members[cluster]}
    kept = sorted(set(range(num_tasks)) - left_out)
    held = sorted(islice(_one_of_each(members[cluster] for cluster in chosen), wanted))
    return Holdout(len(held), len(kept), held.__getitem__, kept.__getitem__)


def _chosen(name: str, members: Mapping[str, Sequence[int]], wanted: int) -> list[str]:
    """Return clusters in the order of their hashes, until clusters and tasks are sufficient."""
    limit = int(LARGEST_SHARE * sum(map(len, members.values())))
    least = min(wanted, ceil(LEAST_CLUSTERS * len(members)))
    chosen: list[str] = []
    num_tasks = 0
    ordered = sorted(members, key=lambda cluster: (_split_digest(f"{name}/{cluster}"), cluster))
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
    """Hold out one task of each block; the hash of the block chooses its offset."""

    def held(i: int) -> int:
        return i * BLOCK + _split_digest(f"{name}/{i}") % BLOCK

    def kept(i: int) -> int:
        block, offset = divmod(i, BLOCK - 1)
        index = block * BLOCK + offset
        return index + (index >= held(block))

    return Holdout(None, None, held, kept)


def _split_digest(text: str) -> int:
    return int.from_bytes(blake2b(f"validation/{text}".encode(), digest_size=8).digest(), "little")
