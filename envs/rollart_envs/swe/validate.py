"""Validate the tasks of a file: the gold solution must pass, and an empty one must not.

Rows of a file that is being made are judged in the same way before they are written
(:func:`judge_for`).

Takes: a task file of either format, and a source of sandboxes. Gives: a :class:`Verdict` per row:
the gold patch must be FULL, and the unchanged repository (or function) NONE. Never: stops at a bad
row, or calls a row sound that could not be judged.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from rollart_core.errors import EpisodeError, SandboxFailure, UserError, first_line
from rollart_core.rollout import loop
from rollart_envs.rows import RowError
from rollart_envs.swe.benches import of_start
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.logs import Status
from rollart_envs.swe.make import Judge, Row
from rollart_envs.swe.reader import (
    BadRow,
    holds_functions,
    read_function_tasks,
    read_repair_tasks,
)
from rollart_envs.swe.repair_judge import (
    TIMEOUT_S,
    Report,
    gold_record,
    graded,
    judge_patch,
)
from rollart_envs.swe.repository import RepositoryTree, TaskFailure, base_tree
from rollart_envs.swe.task import RepairTask, repair_task
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.workspace import Needs, needs_of
from rollart_sandboxes.judging.functions import JudgeInterpreter, find_python, judge
from rollart_sandboxes.pool.source import SandboxSource

Result: TypeAlias = Literal["full", "partial", "none", "error"]
FUNCTION_TIMEOUT_S: Final = 30.0
_RETRIES: Final = 1

T = TypeVar("T")
_END_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one row."""

    name: str
    """Its id, or its position in the file if it has none."""
    gold: Result
    """Result of its own solution; ``error`` if it could not be judged."""
    empty: Result
    """Result of an empty patch."""
    wall_s: float = 0.0
    why: str = ""
    """The problem, on one line; empty if it is sound."""
    gold_statuses: Mapping[str, str] = field(default_factory=dict)
    """Tests that end as XFAIL or XPASS with its own solution, for the row to record."""

    @property
    def is_sound(self) -> bool:
        """Whether it can be used."""
        return self.gold == "full" and self.empty == "none"


@dataclass(frozen=True, slots=True)
class Order:
    """How rows are judged."""

    sandboxes: SandboxSource
    beside: Path
    repos_dir: Path
    python: str
    timeout_s: float | None


async def validate(
    path: Path,
    sandboxes: SandboxSource,
    *,
    repos_dir: Path | None = None,
    concurrency: int = 2,
    python: str = "",
    timeout_s: float | None = None,
    on_row: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Judge the gold and the empty patch of each row; on the sandboxes' event loop (``loop.run``).

    Args:
        path: A task file of either format.
        sandboxes: The source of sandboxes.
        repos_dir: Folder of the repositories; None: ``repos`` in the folder of the file.
        concurrency: Maximum number of concurrent rows; each uses one sandbox at a time.
        python: Absolute path in the sandbox; empty: the ``python3`` on its PATH.
        timeout_s: Timeout of the tests of one judgement; None: half an hour, or 30 s for functions.
        on_row: Called with each verdict.

    Returns:
        The verdicts in the order of the file, with bad rows last.

    Raises:
        UserError: If the file cannot be read or has no task.
    """
    tasks, bad = _read(path)
    order = Order(sandboxes, path.parent, repos_dir or path.parent / "repos", python, timeout_s)
    free = asyncio.Semaphore(concurrency)

    async def one(task: RepairTask | FunctionTask) -> Verdict:
        async with free:
            verdict = await verdict_of(order, task)
        on_row(verdict)
        return verdict

    running = [asyncio.create_task(one(task)) for task in tasks]
    try:
        verdicts = await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    ended = [Verdict(row.name or f"row {row.row}", "error", "error", 0.0, str(row)) for row in bad]
    for verdict in ended:
        on_row(verdict)
    return [*verdicts, *ended]


async def verdict_of(order: Order, task: RepairTask | FunctionTask) -> Verdict:
    """Judge one row; an error becomes its verdict, unless no sandbox starts at all."""
    name = task.task_id if isinstance(task, FunctionTask) else task.instance_id
    why = ""
    statuses: dict[str, Status] = {}
    for _ in range(1 + _RETRIES):
        began = time.monotonic()
        try:
            if isinstance(task, FunctionTask):
                gold, empty, why = await _function(order, task)
            else:
                gold, empty, why, statuses = await _repair(order, task)
        except EpisodeError as error:
            if error.boundary.startswith("sandbox.") and not error.retryable:
                raise
            why = first_line(str(error))
            if not error.retryable:
                break
        except UserError:  # caused by the sandbox's options, not by the row
            raise
        except (OSError, ValueError) as error:
            why = first_line(f"{name}: {error}")
            break
        else:
            return Verdict(name, gold, empty, time.monotonic() - began, why, statuses)
    return Verdict(name, "error", "error", 0.0, why)


async def _repair(order: Order, task: RepairTask) -> tuple[Result, Result, str, dict[str, Status]]:
    tree = await asyncio.to_thread(base_tree, task, order.repos_dir)
    needs = needs_of(task, beside=order.beside, python=order.python)
    reports: list[Report] = []
    for patch in (task.patch, ""):
        report = await judge_patch(
            order.sandboxes, task, tree, patch, needs, timeout_s=order.timeout_s or TIMEOUT_S
        )
        reports.append(report)
    gold, empty = reports
    record = gold_record(task, gold.statuses)
    if record:
        task = replace(task, extra={**task.extra, "gold_statuses": record})
        gold = replace(gold, grade=graded(task, gold.statuses))
        empty = replace(empty, grade=graded(task, empty.statuses))
    return gold.grade.resolution, empty.grade.resolution, _problem(gold, empty), record


def _problem(gold: Report, empty: Report) -> str:
    if gold.grade.resolution != "full":
        failed = ", ".join(gold.grade.failed[:3])
        return f"gold: {gold.why or f'{len(gold.grade.failed)} tests do not pass: {failed}'}"
    if empty.grade.resolution != "none":
        return "empty: some of FAIL_TO_PASS pass without the patch"
    return ""


async def _function(order: Order, task: FunctionTask) -> tuple[Result, Result, str]:
    sandbox = await order.sandboxes.take()
    try:
        path = order.python or await find_python(sandbox)
        interpreter = JudgeInterpreter(path, order.timeout_s or FUNCTION_TIMEOUT_S)
        gold = await judge(sandbox, task.hidden, task.gold_code, interpreter)
        buggy = await judge(sandbox, task.hidden, task.buggy_code, interpreter)
    finally:
        await order.sandboxes.give_back(sandbox)
    results: dict[str, Result] = {"passed": "full", "failed": "none"}
    found = results.get(gold.verdict, "error"), results.get(buggy.verdict, "error")
    if gold.verdict != "passed":
        return *found, first_line(f"gold: {gold.reason}")
    return *found, "" if buggy.verdict == "failed" else f"the buggy function is {buggy.verdict}"


def record_statuses(path: Path, verdicts: Sequence[Verdict], out: Path) -> None:
    """Write the rows of a ``.jsonl`` file again, with the ``gold_statuses`` of their verdicts.

    Raises:
        UserError: If the file has another format, or cannot be written.
    """
    if path.suffix != ".jsonl":
        raise UserError(f"--record: {path.name} is not a .jsonl file; convert it first")
    statuses = {verdict.name: dict(verdict.gold_statuses) for verdict in verdicts}
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("instance_id") in statuses:
            row["gold_statuses"] = statuses[row["instance_id"]]
        lines.append(json.dumps(row) + "\n")
    try:
        out.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--record: {out}: {error.strerror}") from error


def _read(path: Path) -> tuple[tuple[RepairTask | FunctionTask, ...], tuple[BadRow, ...]]:
    if holds_functions(path):
        functions = read_function_tasks(path)
        return functions.tasks, functions.bad
    repairs = read_repair_tasks(path)
    return repairs.tasks, repairs.bad


def judge_for(sandboxes: SandboxSource, python: str) -> Callable[[TaskFolder], Judge]:
    """Return a function that makes a judge for the rows of a folder."""

    def judge_in(folder: TaskFolder) -> Judge:
        async def judge(row: Row) -> str:
            try:
                task = repair_task(row)
                needs = needs_of(task, beside=folder.path, python=python)
                tree = await asyncio.to_thread(base_tree, task, folder.repos)
                gold = await _judged(sandboxes, task, tree, task.patch, needs)
                empty = await _judged(sandboxes, task, tree, "", needs)
            except (RowError, TaskFailure) as error:
                return str(error)
            return _wrong("the gold patch", gold, "full") or _wrong("no patch", empty, "none")

        return judge

    return judge_in


async def _judged(
    sandboxes: SandboxSource,
    task: RepairTask,
    tree: RepositoryTree | None,
    patch: str,
    needs: Needs,
) -> Report:
    """Judge a patch; retry once if the sandbox fails."""
    try:
        return await judge_patch(sandboxes, task, tree, patch, needs)
    except SandboxFailure as failure:
        if of_start(failure):
            raise
        return await judge_patch(sandboxes, task, tree, patch, needs)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the sandboxes' event loop; if interrupted, wait for its clean-up.

    Raises:
        UserError: If it was interrupted, or a file could not be read or written.
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
        raise UserError("stopped; results are kept: run the same command to continue") from None
    except OSError as error:  # a full disk, or a folder without write permission
        what = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{what}{error.strerror or error}; results are kept") from error


def _wrong(what: str, report: Report, wanted: str) -> str:
    found = report.grade.resolution
    if found == wanted:
        return ""
    failed = ", ".join(report.grade.failed[:3])
    return f"{what} is {found}: {report.why or failed}"
