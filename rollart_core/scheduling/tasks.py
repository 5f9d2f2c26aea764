"""Where tasks come from: an endless, seeded, shuffled order, fixed lists, validation holdouts.

    tasks 0 1 2 3 4 5 6 7 ...                 a hash of each task, or of its cluster
      --> held: 3 ...                         validation plays them
      --> kept: 0 1 2 4 5 6 7 ...             training and the warm start have these

Tasks are held out of a split if the environment declares no validation split.

Takes: an env id, a split, how many tasks it has and which of them are alike, a seed. Gives:
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
"""What the seed of a task is made from besides the seed of the run: its split and index, or its
index alone, as in runs of earlier releases."""

LARGEST_SHARE = 0.2
"""Most tasks of a split that are not kept."""
LEAST_CLUSTERS = 0.1
"""Least share of the clusters that validation tasks are of, so that they speak for the others."""
BLOCK = 10
"""Of a split without end one task in so many is held out."""


@dataclass(frozen=True, slots=True)
class TaskSourceState:
    """Where a task source stands; plain values, so that JSON holds it."""

    position: int
    """Tasks given out so far, requeued ones not counted again."""
    requeued: tuple[Task, ...] = ()
    """They come first, in this order."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else a curriculum knows."""


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
            num_tasks: How many tasks the split has; None: without end, in the order 0, 1, 2, ...
            seed: The seed of the run.
            task_seeds: What the seeds of the tasks are made from.
            index_of: Where some tasks of the split are left out: the index of the i-th of the
                others, of which there are ``num_tasks``.

        Raises:
            ValueError: When the split is empty.
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
        """Put a task back, to come before all new ones."""
        self._requeued.append(task)

    def given(self, task: Task) -> None:
        """Go past a task that was given out before; the order is always the same."""
        self.next()

    def state(self) -> TaskSourceState:
        """Return where it stands."""
        return TaskSourceState(self._position, tuple(self._requeued))

    def restore(self, state: TaskSourceState) -> None:
        """Go on from ``state``."""
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
    """Return ``n`` tasks for evaluation: always the same, none twice until the split is used up.

    Args:
        env_id: The environment.
        split: The split.
        n: How many.
        seed: The seed of the run.
        num_tasks: How many tasks the split has; None: without end.
        task_seeds: What the seeds of the tasks are made from.
        index_of: As of :class:`TaskSource`.

    Raises:
        ValueError: When the split is empty.
    """
    _check_not_empty(env_id, split, num_tasks)
    numbers = count() if num_tasks is None else _cycle(num_tasks, seed, split)
    indices = map(index_of or _itself, numbers)
    return [
        Task(env_id, split, i, task_seed(seed, split, i, task_seeds)) for i in islice(indices, n)
    ]


def task_seed(seed: int, split: str, index: int, task_seeds: TaskSeeds = "by_split") -> int:
    """Return the 31-bit seed of a task, a function of the run's seed, the split and the index.

    An environment that draws its tasks from this seed alone has other tasks in each split. (Two of
    them have the same seed by chance with a probability of 1 in 2**31.)

    Args:
        seed: The seed of the run.
        split: The split.
        index: The task's index within the split.
        task_seeds: ``by_index`` leaves out the split, as earlier releases did: then task ``i`` has
            one seed in all splits.
    """
    path = f"{split}/{index}" if task_seeds == "by_split" else f"{index}"
    return _digest(f"task/{seed}/{path}") & 0x7FFF_FFFF


def _cycle(num_tasks: int, seed: int, split: str) -> Iterator[int]:
    epoch = 0
    while True:
        yield from _permutation(num_tasks, seed, split, epoch)
        epoch += 1


def _permutation(n: int, seed: int, split: str, epoch: int) -> list[int]:
    # Sorting by keys from PCG64's raw words does not hang on how any shuffle is implemented.
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
    """Hold out one task of each block, at a place that the hash of the block chooses."""

    def held(i: int) -> int:
        return i * BLOCK + _split_digest(f"{name}/{i}") % BLOCK

    def kept(i: int) -> int:
        block, offset = divmod(i, BLOCK - 1)
        index = block * BLOCK + offset
        return index + (index >= held(block))

    return Holdout(None, None, held, kept)


def _split_digest(text: str) -> int:
    return int.from_bytes(blake2b(f"validation/{text}".encode(), digest_size=8).digest(), "little")
