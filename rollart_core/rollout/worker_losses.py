"""Which tasks may have ended the process of an env worker, and which run in a process of their own.

    a shared worker is lost  --> one strike for each task with a call in progress
    two strikes, or the only such task --> its next episode has a process of its own
    that process ends too    --> its environment ended it: an environment failure
    the episode ends well    --> its task has no strikes any more
    two tasks of one environment did that --> it shares no process with other environments

Takes: losses, and how episodes in processes of their own ended. Gives: where the next episode of a
task runs. Never: starts a process, or blames an environment that shared its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, TypeAlias

from rollart_core.types import Task

TaskKey: TypeAlias = tuple[str, str, int]

MAX_STRIKES: Final = 2
"""From here on a task runs in a process of its own."""
MAX_ENDED: Final = 2
"""Tasks of one environment that ended their own processes; from here on it is kept apart."""


class WorkerLosses:
    """See the module."""

    def __init__(self) -> None:
        self._strikes: Counter[TaskKey] = Counter()
        self._ended: dict[str, set[TaskKey]] = {}
        self._env_ids: set[str] = set()

    def see(self, task: Task) -> None:
        """Note that an environment is in use."""
        self._env_ids.add(task.env_id)

    def lost(self, in_call: Iterable[Task]) -> None:
        """Note that a shared worker was lost while these tasks had a call in progress."""
        keys = {_key(task) for task in in_call}
        for key in keys:
            self._strikes[key] += MAX_STRIKES if len(keys) == 1 else 1

    def ended_alone(self, task: Task) -> None:
        """Note that a process ended in which only this task was."""
        self._ended.setdefault(task.env_id, set()).add(_key(task))

    def survived(self, task: Task) -> None:
        """Note that an episode of a task ended well in a process of its own."""
        self._strikes.pop(_key(task), None)

    def needs_own_process(self, task: Task) -> bool:
        """Return whether the next episode of a task has a process of its own."""
        return self._strikes[_key(task)] >= MAX_STRIKES

    def is_kept_apart(self, env_id: str) -> bool:
        """Return whether an environment shares no process with others, if there are others."""
        return len(self._ended.get(env_id, ())) >= MAX_ENDED and len(self._env_ids) > 1


def _key(task: Task) -> TaskKey:
    return task.env_id, task.split, task.index
