"""A curriculum: how often each environment and task is drawn, from its recent success rate.

    groups that end --> heed() --> [a batch is trained] --> turn() --> factors, tasks to skip
                                                                           |
    next() <-- the environment that is furthest behind its weight x factor <-+

Takes: a task source with a weight for each environment, and groups that have ended, including
groups that are dropped because their rewards are equal. Gives: an endless order of tasks. Never:
changes the order between two batches, so the order does not depend on which group of a batch ended
first; or excludes an environment (its factor has a floor).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import count

from rollart_core.config.training import Curriculum
from rollart_core.errors import ConfigError
from rollart_core.scheduling.task_mix import WeightedSource, beginnings
from rollart_core.scheduling.tasks import TaskSourceState
from rollart_core.types import Group, Task, Trajectory

MOST_SKIPPED = 100_000
"""Maximum number of tasks skipped in search of one that an earlier incarnation of the run drew."""


class CurriculumTasks:
    """Implements :class:`rollart_core.scheduling.task_mix.Tasks`.

    Uses stride scheduling as in :func:`rollart_core.scheduling.task_mix.turns`, with weights that
    change.
    """

    def __init__(
        self, sources: Mapping[str, WeightedSource], config: Curriculum, seed: int
    ) -> None:
        """Start at the first task, with full weights.

        Args:
            sources: By the name of the environment.
            config: The ``curriculum`` section.
            seed: The seed of the run.
        """
        self._config = config
        self._names = list(sources)
        self._sources = [s.source for s in sources.values()]
        self._weights = [s.weight for s in sources.values()]
        self._places = beginnings(self._weights, seed)
        self._solved: list[deque[bool]] = [deque(maxlen=config.window) for _ in self._names]
        self._retired: list[set[int]] = [set() for _ in self._names]
        self._pending: dict[str, Group] = {}
        self._requeued: deque[Task] = deque()
        self._position = 0
        self.num_passed_over = 0
        """Number of tasks that were skipped because they had been solved."""

    # Tasks

    def next(self) -> Task:
        """Return the next task; requeued ones come first."""
        if self._requeued:
            return self._requeued.popleft()
        return self._new()

    def requeue(self, task: Task) -> None:
        """Put a task back; it is returned before all new tasks."""
        self._requeued.append(task)

    def given(self, task: Task) -> None:
        """Record, in order, that an earlier incarnation of the run drew this task."""
        if self._requeued and self._requeued[0] == task:
            self._requeued.popleft()
            return
        k = self._names.index(task.env_id)
        self._move_on(k)
        self._draw(k, until=task)

    def state(self) -> TaskSourceState:
        """Return the current position as plain values."""
        notes = {
            "places": list(self._places),
            "positions": [s.state().position for s in self._sources],
            "solved": [[int(one) for one in window] for window in self._solved],
            "retired": [sorted(tasks) for tasks in self._retired],
        }
        return TaskSourceState(self._position, tuple(self._requeued), notes)

    def restore(self, state: TaskSourceState) -> None:
        """Continue from ``state``."""
        notes = state.notes
        self._position, self._requeued = state.position, deque(state.requeued)
        self._places = [float(place) for place in notes["places"]]
        for source, position in zip(self._sources, notes["positions"], strict=True):
            source.restore(TaskSourceState(int(position)))
        self._solved = [deque(map(bool, w), self._config.window) for w in notes["solved"]]
        self._retired = [set(tasks) for tasks in notes["retired"]]
        self._pending.clear()

    # Feedback from groups

    def heed(self, group: Group) -> None:
        """Record a group that has ended, whether it is trained or dropped."""
        self._pending[group.group_id] = group

    def turn(self) -> None:
        """Apply all recorded groups to the factors and the tasks to skip."""
        for _, group in sorted(self._pending.items()):
            k = self._names.index(group.task.env_id)
            outcomes = [self._is_solved(t) for t in group.trajectories]
            self._solved[k].extend(outcomes)
            rate, least = sum(outcomes) / len(outcomes), self._config.retire_above
            if least is not None and rate >= least:
                self._retired[k].add(group.task.index)
            else:
                self._retired[k].discard(group.task.index)
        self._pending.clear()

    def factor(self, k: int) -> float:
        """Return the current factor of an environment's weight."""
        window, config = self._solved[k], self._config
        if len(window) < min(config.begin_after, config.window):
            return 1.0
        p = sum(window) / len(window)
        return max(config.floor, 4 * p * (1 - p))

    def gauges(self) -> dict[str, float]:
        """Return factors and solved shares of each environment as metrics."""
        found = {"curriculum/passed_over": float(self.num_passed_over)}
        for k, name in enumerate(self._names):
            found[f"curriculum/{name}/factor"] = self.factor(k)
            if self._solved[k]:
                found[f"curriculum/{name}/solved"] = sum(self._solved[k]) / len(self._solved[k])
        return found

    def _is_solved(self, trajectory: Trajectory) -> bool:
        if self._config.solved_at is None:
            return bool(trajectory.success)
        return trajectory.reward is not None and trajectory.reward >= self._config.solved_at

    def _new(self) -> Task:
        k = min(range(len(self._places)), key=lambda i: (self._places[i], i))
        self._move_on(k)
        return self._draw(k)

    def _move_on(self, k: int) -> None:
        """Advance an environment by one stride of its current weight."""
        self._places[k] += 1 / (self._weights[k] * self.factor(k))
        self._position += 1

    def _draw(self, k: int, until: Task | None = None) -> Task:
        """Return an environment's next task; a retired task is skipped once."""
        for num_skipped in count():
            task = self._sources[k].next()
            if until is not None and task != until:
                if num_skipped > MOST_SKIPPED:
                    raise ConfigError(
                        f"the curriculum cannot continue: {until} is not among the next "
                        f"{MOST_SKIPPED} tasks of {self._names[k]}; has the environment changed?"
                    )
                self._retired[k].discard(task.index)
                continue
            if until is None and task.index in self._retired[k]:
                self._retired[k].discard(task.index)
                self.num_passed_over += 1
                continue
            return task
        raise AssertionError("count() has no end")
