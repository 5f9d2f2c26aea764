"""The tasks of one file, in splits.

Takes: tasks with ids. Gives: the i-th task of a split, or a drawn one. Never: puts a task in two
of the other splits, unless the file has fewer than three.

Tasks are ordered by a hash of their ids: the first fifth is ``test``, the next eighth ``warm``, the
rest ``train``, with at least one each. So the splits depend only on the ids, not on the order of
the rows. Within a split, tasks are in the order of the file.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rollart_core.contracts.env import ALL_TASKS
from rollart_core.errors import UserError
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.generated import generated_tasks
from rollart_envs.swe.reader import BadRow, read_function_tasks, read_repair_tasks
from rollart_envs.swe.task import RepairTask

T = TypeVar("T")
SPLITS = ("train", "warm", "test")
_TEST, _WARM = 1 / 5, 1 / 8


class TaskBook(Generic[T]):
    """Tasks in splits.

    Args:
        tasks: Id -> task.
        bad: The rows of the file that are not tasks.
        splits: Split -> ids. If not given, a hash of the ids decides.
    """

    def __init__(
        self,
        tasks: Mapping[str, T],
        bad: Sequence[BadRow] = (),
        splits: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.tasks = dict(tasks)
        self.bad = tuple(bad)
        self.splits = {**(splits or split_ids(list(tasks))), ALL_TASKS: tuple(tasks)}

    def ids(self, split: str) -> tuple[str, ...]:
        """Return the ids of a split's tasks.

        Raises:
            ValueError: If the split does not exist.
        """
        if split not in self.splits:
            raise ValueError(f"no split {split!r}; there are {', '.join(self.splits)}")
        return self.splits[split]

    def choose(self, options: Mapping[str, Any], draw: np.random.Generator) -> T:
        """Return the task that reset's options select, or one drawn from the split.

        Args:
            options: ``{"task": i, "split": "train"}``, or ``{"instance": id}``.
            draw: Random generator, used if no task is selected.

        Raises:
            ValueError: If the option, split, task or id does not exist.
        """
        unknown = sorted(set(options) - {"task", "split", "instance"})
        if unknown:
            known = "task, split, instance"
            raise ValueError(f"unknown reset option {unknown[0]!r}; use one of {known}")
        if "instance" in options:
            if options["instance"] not in self.tasks:
                raise ValueError(f"no task {options['instance']!r} in the file")
            return self.tasks[options["instance"]]
        ids = self.ids(options.get("split", "train"))
        if "task" not in options:
            return self.tasks[random.Random(int(draw.integers(2**63))).choice(ids)]
        index = options["task"]
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(ids):
            raise ValueError(f"task: {index!r} is not an index from 0 to {len(ids) - 1}")
        return self.tasks[ids[index]]


def split_ids(ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return split -> ids; with fewer than three ids, every split has all of them."""
    if len(ids) < len(SPLITS):
        return dict.fromkeys(SPLITS, tuple(ids))
    by_hash = sorted(ids, key=lambda name: sha256(name.encode("utf-8", "surrogatepass")).digest())
    num_test, num_warm = (max(1, round(share * len(ids))) for share in (_TEST, _WARM))
    test, warm = set(by_hash[:num_test]), set(by_hash[num_test : num_test + num_warm])
    return {
        "train": tuple(name for name in ids if name not in test and name not in warm),
        "warm": tuple(name for name in ids if name in warm),
        "test": tuple(name for name in ids if name in test),
    }


def function_tasks(path: Path) -> TaskBook[FunctionTask]:
    """Return the tasks of a file in HumanEvalPack's format; each process reads it once.

    Raises:
        UserError: If the file cannot be read or has no task.
    """
    return _function_tasks(*_stamp(path))


def generated_functions(num_tasks: int) -> TaskBook[FunctionTask]:
    """Return generated tasks; each process generates them once.

    Raises:
        UserError: If there are fewer different functions.
    """
    try:
        made = generated_tasks(num_tasks)
    except ValueError as error:
        raise UserError(f"num_generated: {error}; use fewer") from None
    splits = {
        split: tuple(one.task.task_id for one in made if one.split == split) for split in SPLITS
    }
    return TaskBook({one.task.task_id: one.task for one in made}, splits=splits)


def repair_tasks(path: Path) -> TaskBook[RepairTask]:
    """Return the tasks of a file in SWE-bench's format; each process reads it once.

    Raises:
        UserError: If the file cannot be read or has no task.
    """
    return _repair_tasks(*_stamp(path))


def own_file(name: str) -> Path:
    """Return the path of a built-in task file."""
    return Path(str(resources.files(__package__))) / name


def _stamp(path: Path) -> tuple[Path, int, int]:
    """Return the path, size and modification time of a file, as its cache key."""
    try:
        found = path.stat()
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"tasks: {path}: {why}; use a .jsonl or .parquet file") from None
    return path.absolute(), found.st_size, found.st_mtime_ns


@lru_cache(maxsize=8)
def _function_tasks(path: Path, size: int, stamp: int) -> TaskBook[FunctionTask]:
    rows = read_function_tasks(path)
    return TaskBook({task.task_id: task for task in rows.tasks}, rows.bad)


@lru_cache(maxsize=8)
def _repair_tasks(path: Path, size: int, stamp: int) -> TaskBook[RepairTask]:
    rows = read_repair_tasks(path)
    return TaskBook({task.instance_id: task for task in rows.tasks}, rows.bad)
