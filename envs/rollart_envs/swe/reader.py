"""Read files of task rows, JSON lines or Parquet, and report each bad row.

Takes: a path, and a function that makes a task from a row. Gives: :class:`Rows`, the good tasks and
the bad rows. Never: drops a row silently, or gives two tasks with one id.

By default reading continues after a bad row: it is listed in ``Rows.bad`` for the caller. With
``strict=True`` the first bad row raises. A file without a good row always raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rollart_envs.rows import Row, RowError, TaskFileError, read_rows
from rollart_envs.swe.function_task import FunctionTask, function_task
from rollart_envs.swe.task import RepairTask, repair_task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a task."""

    path: Path
    row: int
    """Counted from 1; in JSON lines this is the line number."""
    name: str
    """The id of the task, if the row has one."""
    problem: str

    def __str__(self) -> str:
        named = f" ({self.name})" if self.name else ""
        return f"{self.path}, row {self.row}{named}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """The content of a file."""

    tasks: tuple[T, ...]
    bad: tuple[BadRow, ...] = ()


def read_repair_tasks(path: Path, *, strict: bool = False) -> Rows[RepairTask]:
    """Read tasks in SWE-bench's format from ``.jsonl`` or ``.parquet``.

    Raises:
        TaskFileError: If the file cannot be read or has no task, or with ``strict`` a row is bad.
    """
    return _read(path, repair_task, "instance_id", strict)


def read_function_tasks(path: Path, *, strict: bool = False) -> Rows[FunctionTask]:
    """Read tasks in HumanEvalPack's format from ``.jsonl`` or ``.parquet``.

    Raises:
        TaskFileError: If the file cannot be read or has no task, or with ``strict`` a row is bad.
    """
    return _read(path, function_task, "task_id", strict)


def holds_functions(path: Path) -> bool:
    """Return whether a file is in HumanEvalPack's format, by its first row.

    Raises:
        TaskFileError: If the file cannot be read.
    """
    first = next((row for _, row in read_rows(path) if not isinstance(row, RowError)), {})
    return "entry_point" in first


def _read(path: Path, make: Callable[[Row], T], id_field: str, strict: bool) -> Rows[T]:
    tasks: dict[str, T] = {}
    bad: list[BadRow] = []
    for number, found in read_rows(path):
        name = "" if isinstance(found, RowError) else str(found.get(id_field) or "")
        try:
            if isinstance(found, RowError):
                raise found
            task = make(found)
            if name in tasks:
                raise RowError(id_field, "stands in an earlier row already")
            tasks[name] = task
        except RowError as error:
            bad.append(BadRow(path, number, name, str(error)))
            if strict:
                raise TaskFileError(str(bad[-1])) from None
    if not tasks:
        raise TaskFileError(str(bad[0]) if bad else f"{path}: holds no rows")
    return Rows(tuple(tasks.values()), tuple(bad))
