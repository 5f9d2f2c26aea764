"""Tasks of several environments, in proportion to their weights.

    position 0 1 2 3 4 5 ...
    env      A A B A A B      weights 2 and 1: stride scheduling from a seeded offset

Takes: a task source and a weight for each environment. Gives: one endless order of tasks, the same
for the same seed, and fixed held-out lists. Never: lets the number of an environment's tasks among
the first n differ from its weighted share by more than one task for each environment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from rollart_core.scheduling.tasks import TaskSource, TaskSourceState
from rollart_core.types import Task


class Tasks(Protocol):
    """A source of tasks: one split of one environment, or a mix."""

    def next(self) -> Task:
        """Return the next task; requeued ones come first."""

    def requeue(self, task: Task) -> None:
        """Put a task back; it is returned before all new tasks."""

    def given(self, task: Task) -> None:
        """Record, in order, that an earlier incarnation of the run drew this task."""

    def state(self) -> TaskSourceState:
        """Return the current position as plain values."""

    def restore(self, state: TaskSourceState) -> None:
        """Continue from ``state``."""


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """The tasks of one environment, and its weight."""

    source: TaskSource
    weight: float


class TaskMix:
    """A mix of several sources. Implements :class:`Tasks`."""

    def __init__(self, sources: Sequence[WeightedSource], seed: int) -> None:
        """Start at the first task.

        Args:
            sources: One for each environment.
            seed: The seed of the run.
        """
        self._sources = [s.source for s in sources]
        self._weights = [s.weight for s in sources]
        self._seed = seed
        self._requeued: deque[Task] = deque()
        self._position = 0
        self._turns = turns(self._weights, seed)

    def next(self) -> Task:
        """Return the next task; requeued ones come first."""
        if self._requeued:
            return self._requeued.popleft()
        self._position += 1
        return self._sources[next(self._turns)].next()

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
        """Continue from ``state``; the position of the mix determines that of each source."""
        self._turns = turns(self._weights, self._seed)
        given = [0] * len(self._sources)
        for which in islice(self._turns, state.position):
            given[which] += 1
        for source, position in zip(self._sources, given, strict=True):
            source.restore(TaskSourceState(position))
        self._position = state.position
        self._requeued = deque(state.requeued)


def turns(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield indices without end; index ``i`` occurs in proportion to ``weights[i]``.

    Uses stride scheduling (Waldspurger and Weihl 1995, MIT/LCS/TM-528). A turn of ``i`` advances it
    by ``1 / weights[i]``, and the index that is furthest behind has the next turn. Each index
    begins at a seeded offset within its first stride.
    """
    places = beginnings(weights, seed)
    given = [0] * len(weights)
    while True:
        who = min(range(len(weights)), key=lambda i: (places[i] + given[i] / weights[i], i))
        given[who] += 1
        yield who


def beginnings(weights: Sequence[float], seed: int) -> list[float]:
    """Return the start of each index: a seeded offset within its first stride."""
    return [_fraction(f"mix/{seed}/{i}") / w for i, w in enumerate(weights)]


def shares(weights: Sequence[float], n: int) -> list[int]:
    """Divide ``n`` in proportion to the weights: each share is at least 1, the sum is ``n``.

    The shares are rounded down, then the largest remainders get one more.

    Raises:
        ValueError: If ``n`` is less than the number of weights.
    """
    if n < len(weights):
        raise ValueError(f"{n} cannot be divided among {len(weights)}: each share is at least 1")
    spare, total = n - len(weights), sum(weights)
    exact = [w / total * n - 1 for w in weights]
    above = [max(0.0, e) for e in exact]
    scale = spare / sum(above) if sum(above) else 0.0
    parts = [int(a * scale) for a in above]
    by_rest = sorted(range(len(weights)), key=lambda i: (parts[i] - above[i] * scale, i))
    for i in by_rest[: spare - sum(parts)]:
        parts[i] += 1
    return [1 + part for part in parts]


def interleaved(lists: Sequence[Sequence[Task]], seed: int) -> list[Task]:
    """Merge ``lists`` into one list; every section of it has each list's tasks in proportion."""
    rest = [deque(tasks) for tasks in lists if tasks]
    order = turns([len(tasks) for tasks in rest], seed)
    mixed: list[Task] = []
    while any(rest):
        tasks = rest[next(order)]
        if tasks:
            mixed.append(tasks.popleft())
    return mixed


def _fraction(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48
