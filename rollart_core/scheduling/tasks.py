"""Where tasks come from: an endless, seeded, shuffled order, and fixed held-out lists.

Takes: an env id, a split, how many tasks it has, a seed. Gives: :class:`Task` records. Never: opens
an environment. The same arguments give the same order on every machine and Python version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from typing import Any, Literal, TypeAlias

import numpy as np

from rollart_core.types import Task

TaskSeeds: TypeAlias = Literal["by_split", "by_index"]
"""What the seed of a task is made from besides the seed of the run: its split and index, or its
index alone, as in runs of earlier releases."""


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
