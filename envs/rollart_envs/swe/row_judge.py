"""Rows judged before they are written: gold patch full, empty patch none, by the one grader.

Takes: a row, and where its repository and packages lie. Gives: what is wrong with it. Never: grades
in a way of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from rollart_core.errors import SandboxFailure, UserError
from rollart_core.rollout import loop
from rollart_envs.swe.benches import of_start
from rollart_envs.swe.make import Judge, Row
from rollart_envs.swe.repair_judge import Report, judge_patch
from rollart_envs.swe.repository import RepositoryTree, TaskFailure, base_tree
from rollart_envs.swe.task import RepairTask, RowError, repair_task
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.workspace import Needs, needs_of
from rollart_sandboxes.pool.source import SandboxSource

T = TypeVar("T")
_END_S: Final = 20.0


def judge_for(boxes: SandboxSource, python: str) -> Callable[[TaskFolder], Judge]:
    """Return what makes a judge of the rows of a folder."""

    def judge_in(folder: TaskFolder) -> Judge:
        async def judge(row: Row) -> str:
            try:
                task = repair_task(row)
                needs = needs_of(task, beside=folder.path, python=python)
                tree = await asyncio.to_thread(base_tree, task, folder.repos)
                gold = await _judged(boxes, task, tree, task.patch, needs)
                empty = await _judged(boxes, task, tree, "", needs)
            except (RowError, TaskFailure) as error:
                return str(error)
            return _wrong("the gold patch", gold, "full") or _wrong("no patch", empty, "none")

        return judge

    return judge_in


async def _judged(
    boxes: SandboxSource, task: RepairTask, tree: RepositoryTree | None, patch: str, needs: Needs
) -> Report:
    """Judge a patch, once more if the box fails."""
    try:
        return await judge_patch(boxes, task, tree, patch, needs)
    except SandboxFailure as failure:
        if of_start(failure):
            raise
        return await judge_patch(boxes, task, tree, patch, needs)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the boxes' loop to its end; when interrupted, wait until it tidied up.

    Raises:
        UserError: It was interrupted, or a file could not be read or written.
    """
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = loop.submit(watched())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(_END_S)
        raise UserError("stopped; what is done is kept: give the same command to go on") from None
    except OSError as error:  # a full disk, a folder that may not be written
        what = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{what}{error.strerror or error}; what is done is kept") from error


def _wrong(what: str, report: Report, wanted: str) -> str:
    found = report.grade.resolution
    if found == wanted:
        return ""
    failed = ", ".join(report.grade.failed[:3])
    return f"{what} is {found}: {report.why or failed}"
