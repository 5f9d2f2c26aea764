"""Judge a patch in a new sandbox; all patches are graded in this way.

Takes: a source of sandboxes, a task, its tree at the base commit, a patch. Gives: a
:class:`Report`. Never: grades in the agent's sandbox, or trusts the output of a test if pytest or
unittest is the runner.

    a new sandbox -> tree at the base commit, without history
        <- the patch, without files that could control the runner or are among the tests
        <- test files from the base, then the test patch
        -> tests, under a reporter that signs the result of each -> Grade

A patch must not change these files, unless the task's own patch does: files that a runner reads on
its own (``conftest.py``, ``pytest.ini``, ``setup.cfg``, ``pyproject.toml``, ...), test files that
the task names, and the files in their test folders.

A patch is graded by the tests that it should fix and those that it must not break. A test that did
not run, or was skipped, does not count as passed. Ids in SWE-bench were read from logs and are cut
at their first space (``test_x[*arg`` of ``test_x[*arg, **kwargs]``), so one of them can stand for
several tests. The worst of these counts, because pytest prints failures last and the harness keeps
the last line. A few ids are not tests: ``[`` and ``[100%]---`` came from output of pytest in
pytest. No run can give these: they are left out, and listed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, Literal, TypeAlias

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import SandboxFailure
from rollart_envs.swe import guard, report_plugin, unit_runners
from rollart_envs.swe.acceptable import acceptable, run_of, tests_of
from rollart_envs.swe.logs import (
    READERS,
    MarkersMissing,
    Status,
    Statuses,
    between_markers,
    marked,
    mouse_number,
    short_option,
    worst,
)
from rollart_envs.swe.patch import (
    Applied,
    apply_patch,
    restore_commands,
    touched_files,
)
from rollart_envs.swe.report_plugin import TAMPERED, signed_text
from rollart_envs.swe.repository import RepositoryTree, TaskFailure
from rollart_envs.swe.runs import TestRun
from rollart_envs.swe.task import RepairTask, gold_statuses
from rollart_envs.swe.tools import cut_output
from rollart_envs.swe.workspace import Needs, Workspace, sandbox_options, unpack
from rollart_sandboxes.judging.functions import find_python
from rollart_sandboxes.pool.source import SandboxSource

_STATUSES: tuple[Status, ...] = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
RAN = (0, 1)
"""pytest's exit codes if the tests ran to the end: all passed, or some failed."""


class ReportError(ValueError):
    """A report that proves nothing; the message has the reason."""


def read_report(content: bytes, nonce: str) -> dict[str, Status]:
    """Return the status of each test in a report.

    Raises:
        ReportError: If it has no end, pytest did not finish, or a line is not the plugin's.
    """
    records = [_record(line, number, nonce) for number, line in enumerate(content.splitlines())]
    if not records or "end" not in records[-1]:
        raise ReportError("the report has no end: the tests were stopped, or ended the process")
    if records[-1]["end"] == TAMPERED:
        raise ReportError(f"tampered: {records[-1].get('why') or 'the runner was changed'}")
    if records[-1]["end"] not in RAN:
        raise ReportError(f"pytest ended with code {records[-1]['end']}")
    pairs = [(str(record.get("id")), _status(record)) for record in records[:-1]]
    return worst(pairs)


def _record(line: bytes, number: int, nonce: str) -> dict[str, object]:
    try:
        record = json.loads(line)
        mac = record["mac"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ReportError(f"line {number + 1} of the report is not the plugin's") from None
    right = hmac.new(nonce.encode(), signed_text(record), hashlib.sha256).hexdigest()
    if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), right.encode()):
        raise ReportError(f"line {number + 1} of the report is not signed by this run")
    if record.get("n") != number:
        raise ReportError(f"line {number + 1} of the report is out of its order")
    return dict(record)


def _status(record: dict[str, object]) -> Status:
    for status in _STATUSES:
        if record.get("status") == status:
            return status
    raise ReportError(f"the report holds the status {record.get('status')!r}")


TIMEOUT_S: Final = 1800.0
LOG_CHARS: Final = 20_000
_LOG_BYTES: Final = 1 << 24
_SMALL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """The grade of a patch, and the details of its run."""

    grade: Grade
    statuses: Statuses = field(default_factory=dict)
    """Status of each test that ran."""
    log: str = ""
    """The output of the run, cut in the middle."""
    wall_s: float = 0.0
    """Seconds in total, including the sandbox's start."""
    why: str = ""
    """Why nothing was proven; empty if the tests ran."""
    left_out: tuple[str, ...] = ()
    """Paths of the patch that were not applied, because it must not change them."""

    @classmethod
    def none(cls, task: RepairTask, why: str) -> Report:
        """Return a report with grade none, for a patch that needs no run."""
        return cls(graded(task, {}), why=why)


class _NoProof(Exception):
    """The run proves nothing; has the reason and the output."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


async def judge_patch(
    sandboxes: SandboxSource,
    task: RepairTask,
    tree: RepositoryTree | None,
    patch: str,
    needs: Needs,
    *,
    timeout_s: float = TIMEOUT_S,
    parity: bool = False,
) -> Report:
    """Grade a patch in its own sandbox.

    Args:
        sandboxes: The source of sandboxes.
        task: The task.
        tree: The repository at the base commit; None: that of the task's image.
        patch: A unified diff; empty: the unchanged repository.
        needs: The interpreter and packages of the task (``needs_of``).
        timeout_s: Timeout of the tests.
        parity: Whether XFAIL passes, as in the SWE-bench harness; otherwise only if it is in the
            row's ``gold_statuses``.

    Raises:
        SandboxFailure: If the sandbox failed.
        TaskFailure: If the task's own test patch does not apply to its own base.
    """
    began = time.monotonic()
    run_of(task)  # fail before a sandbox is started if the row does not define how its tests run
    wanted, left_out = acceptable(task, patch)
    sandbox = await sandboxes.take(**sandbox_options(sandboxes, task, needs))
    statuses: Statuses = {}
    why = log = ""
    try:
        if not needs.python:
            needs = replace(needs, python=await find_python(sandbox))
        workspace = await unpack(sandbox, task, tree, needs)
        context = await _context(sandbox, task, workspace, wanted, needs)
        await _put_in(sandbox, task, workspace, wanted)
        statuses, log = await _run(sandbox, task, workspace, needs, context, timeout_s)
    except _NoProof as found:
        why, log = str(found), found.log
    finally:
        await sandboxes.give_back(sandbox)
    return Report(
        graded(task, statuses, parity=parity),
        statuses,
        cut_output(log, LOG_CHARS),
        time.monotonic() - began,
        why,
        left_out,
    )


def graded(task: RepairTask, statuses: Statuses, *, parity: bool = False) -> Grade:
    """Grade the statuses of a run."""
    return grade(
        _named(task, statuses),
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
        framework=run_of(task).framework,
        gold=None if parity else gold_statuses(task),
    )


def gold_record(task: RepairTask, statuses: Statuses) -> dict[str, Status]:
    """Return the statuses of the gold patch that a row must record."""
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    return expected_failures(_named(task, statuses), tests, run_of(task).framework)


def _named(task: RepairTask, statuses: Statuses) -> Statuses:
    """Return statuses under all names that the task's ids can have."""
    return _both_names(statuses) if run_of(task).runner in ("unittest", "django") else statuses


async def _context(
    sandbox: Sandbox, task: RepairTask, workspace: Workspace, patch: str, needs: Needs
) -> dict[str, object]:
    """Return the guard's input: base versions of the changed files, and the test files.

    The patch is not applied yet, so it does not decide whether the repository is the runner's.
    """
    base: dict[str, str] = {}
    for path in touched_files(patch):
        try:
            content = await sandbox.read_file(f"{workspace.repo_dir}/{path}")
        except (OSError, ValueError):
            content = b""
        base[path] = content.decode("utf-8", "replace")
    tests, folders = tests_of(task)
    added = "\n".join(line for line in task.patch.split("\n") if line.startswith("+"))
    words = {word for words in guard.WORDS.values() for word in words if word in added}
    words |= set(re.findall(r"\b(?:pytest_|assert)\w+", added))
    return {
        "base": base,
        "gold": " ".join(sorted(words)),
        "calls": sorted(set(re.findall(r"\b(\w+)\(", added))),
        "own": sorted(touched_files(task.patch)),
        "is_runner": await _is_runner(sandbox, workspace, needs),
        "tests": sorted(tests),
        "test_folders": sorted(folders),
    }


async def _is_runner(sandbox: Sandbox, workspace: Workspace, needs: Needs) -> bool:
    """Return whether the repository contains pytest, or a package that it needs."""
    folders = ("", *(f"{path}/" for path in needs.source_path))
    names = [f"{folder}{name}/__init__.py" for folder in folders for name in report_plugin.RUNNER]
    listed = await sandbox.exec(
        ("git", "ls-files", "--", *names), timeout_s=_SMALL_S, cwd=workspace.repo_dir
    )
    if listed.exit_code != 0:
        raise _unfit(f"git ls-files failed: {_said(listed).strip()[-200:]}")
    return bool(listed.stdout.strip())


async def _put_in(sandbox: Sandbox, task: RepairTask, workspace: Workspace, patch: str) -> None:
    """Apply the patch, then restore the tests of the task."""
    applied = await _apply(sandbox, workspace, patch, "model")
    if not applied.ok:
        raise _NoProof("the patch does not apply", applied.log)
    for command in restore_commands(task.test_patch, workspace.base):
        result = await sandbox.exec(command, timeout_s=_SMALL_S, cwd=workspace.repo_dir)
        if result.exit_code != 0:
            raise _NoProof("the test files could not be brought back", _said(result))
    applied = await _apply(sandbox, workspace, task.test_patch, "test")
    if applied.ok:
        return
    await sandbox.exec(("git", "reset", "-q", "--hard"), timeout_s=_SMALL_S, cwd=workspace.repo_dir)
    await sandbox.exec(("git", "clean", "-qfdx"), timeout_s=_SMALL_S, cwd=workspace.repo_dir)
    if (await _apply(sandbox, workspace, task.test_patch, "test")).ok:
        raise _NoProof("the test patch does not apply after the patch", applied.log)
    raise TaskFailure(
        f"{task.instance_id}: its test patch does not apply to its base commit: "
        f"{applied.log.strip()[-300:]}",
        boundary="swe.test_patch",
    )


async def _apply(sandbox: Sandbox, workspace: Workspace, patch: str, name: str) -> Applied:
    """Apply a patch, and remove its copy so that the tested code cannot read it."""
    path = f"{workspace.scratch}/{name}.patch"
    applied = await apply_patch(sandbox, patch, repo_dir=workspace.repo_dir, patch_path=path)
    removed = await sandbox.exec(("rm", "-f", path), timeout_s=_SMALL_S)
    if removed.exit_code != 0:
        raise _unfit(f"{path} cannot be removed: {_said(removed).strip()[-200:]}")
    return applied


async def _run(
    sandbox: Sandbox,
    task: RepairTask,
    workspace: Workspace,
    needs: Needs,
    context: Mapping[str, object],
    timeout_s: float,
) -> tuple[Statuses, str]:
    """Run the tests; return the status of each, and the log."""
    run = run_of(task)
    if run.is_signed:
        return await _reported(sandbox, run, workspace, needs, context, timeout_s)
    return await _logged(sandbox, run, workspace, needs, timeout_s)


async def _reported(
    sandbox: Sandbox,
    run: TestRun,
    workspace: Workspace,
    needs: Needs,
    context: Mapping[str, object],
    timeout_s: float,
) -> tuple[Statuses, str]:
    nonce, repo = secrets.token_hex(16), PurePosixPath(workspace.repo_dir)
    folder = f"{workspace.scratch}/rollart-{secrets.token_hex(8)}"
    for name, source in _reporter().items():
        await sandbox.write_file(f"{folder}/{name}", source)
    order = {
        **context,
        "nonce": nonce,
        "path": f"{folder}/report",
        "runner": run.runner,
        "packages": list(needs.python_path),
        "sources": [str(repo / path) for path in needs.source_path],
        "environment": f"{workspace.scratch}/python-{secrets.token_hex(4)}"
        if needs.python_path
        else "",
    }
    result = await _exec(
        sandbox,
        (needs.python, "-I", "-B", f"{folder}/report_plugin.py", *run.arguments),
        workspace,
        needs,
        timeout_s,
        stdin=json.dumps(order).encode() + b"\n",
    )
    log = _said(result)
    try:
        statuses = read_report(await sandbox.read_file(f"{folder}/report"), nonce)
    except (OSError, ReportError) as error:
        if not context["is_runner"]:
            await _expect_runner(sandbox, run, workspace, needs)
        raise _NoProof(str(error), log) from None
    return statuses, log


async def _expect_runner(
    sandbox: Sandbox, run: TestRun, workspace: Workspace, needs: Needs
) -> None:
    """Raise an error if the sandbox cannot import the test runner; no patch can cause that.

    Code that ran in the sandbox cannot have changed the modules imported here.
    """
    module = "_pytest.config" if run.runner == "pytest" else "unittest"
    code = f"import sys; sys.path[1:1] = {list(needs.python_path)!r}; import {module}"
    argv = (needs.python, "-I", "-B", "-c", code)
    env = needs.environ(workspace.repo_dir)
    result = await sandbox.exec(argv, timeout_s=_SMALL_S, env=env)
    if result.exit_code != 0:
        said = _said(result).strip().splitlines()[-1:]
        raise _unfit(f"{needs.python} of the box cannot import {module}: {' '.join(said)}")


async def _logged(
    sandbox: Sandbox, run: TestRun, workspace: Workspace, needs: Needs, timeout_s: float
) -> tuple[Statuses, str]:
    nonce = secrets.token_hex(16)
    command = marked(f"( {run.command}\n) 2>&1", nonce)
    result = await _exec(sandbox, ("bash", "-c", command), workspace, needs, timeout_s)
    log = _said(result)
    if result.truncated:  # the results in its middle are lost
        num_bytes = len(result.stdout)
        raise _NoProof(
            f"the log is longer than the {num_bytes} bytes that the sandbox returns", log
        )
    try:
        said = between_markers(log, nonce)
    except MarkersMissing as error:
        raise _NoProof(str(error), log) from None
    return READERS[run.framework](said), log


async def _exec(
    sandbox: Sandbox,
    argv: Sequence[str],
    workspace: Workspace,
    needs: Needs,
    timeout_s: float,
    *,
    stdin: bytes = b"",
) -> ExecResult:
    result = await sandbox.exec(
        argv,
        timeout_s=timeout_s,
        cwd=workspace.repo_dir,
        env=needs.environ(workspace.repo_dir),
        stdin=stdin,
        max_output_bytes=_LOG_BYTES,
    )
    if result.timed_out:
        raise _NoProof(f"the tests ran out of time: {timeout_s:g} s", _said(result))
    if result.exit_code in (126, 127) and result.wall_s == 0.0:
        raise _unfit(f"the box cannot run {argv[0]}: {_said(result).strip()[-200:]}")
    return result


def _both_names(statuses: Statuses) -> Statuses:
    """Return unittest's statuses also under the names in its log."""
    logged = {}
    for test, status in statuses.items():
        where, _, method = test.rpartition(".")
        logged[f"{method} ({where})"] = status
        logged[f"{method} ({test})"] = status
    return {**logged, **statuses}


def _unfit(why: str) -> SandboxFailure:
    failure = SandboxFailure(why, boundary="swe.tests")
    failure.retryable = False
    return failure


def _said(result: ExecResult) -> str:
    return (result.stdout + result.stderr).decode("utf-8", "replace")


@cache
def _reporter() -> dict[str, bytes]:
    paths = (Path(module.__file__ or "") for module in (report_plugin, guard, unit_runners))
    return {path.name: path.read_bytes() for path in paths}


Resolution: TypeAlias = Literal["full", "partial", "none"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a patch."""

    resolution: Resolution
    fail_to_pass: float
    """Share of the failing tests that now pass, in [0, 1]."""
    pass_to_pass: float
    """Share of the passing tests that still pass, in [0, 1]; 1 if there are none."""
    failed: tuple[str, ...]
    """Ids of the task's tests that had to pass and did not."""
    left_out: tuple[str, ...] = ()
    """Ids of the task that are not tests."""

    @property
    def reward(self) -> float:
        """1 for a full resolution, else 0."""
        return float(self.resolution == "full")


def grade(
    statuses: Statuses,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    framework: str = "pytest",
    gold: Statuses | None = None,
) -> Grade:
    """Grade a run: full when every test passes, partial when some do and none broke, else none.

    Args:
        statuses: Statuses from a log or a report; empty if the run gave no proof.
        fail_to_pass: Ids of tests that must pass now.
        pass_to_pass: Ids of tests that must still pass.
        framework: A key of ``logs.READERS``.
        gold: Result of :func:`expected_failures` for the gold patch: XFAIL and XPASS count only for
            these tests. None: XFAIL counts and XPASS does not, as in the SWE-bench harness.
    """
    known = _by_task_id(statuses, framework)
    left_out = [
        test for test in (*fail_to_pass, *pass_to_pass) if _is_noise(test) and test not in known
    ]
    mended = _passes([test for test in fail_to_pass if test not in left_out], known, gold)
    kept = _passes([test for test in pass_to_pass if test not in left_out], known, gold)
    failed = tuple(test for test, passed in (*mended.items(), *kept.items()) if not passed)
    to_mend, to_keep = _share(mended, empty=0.0), _share(kept, empty=1.0)
    return Grade(_resolution(to_mend, to_keep), to_mend, to_keep, failed, tuple(left_out))


def cut_id(test: str) -> str:
    """Return a pytest id as a log reader stores it: up to its first space."""
    return test.split(maxsplit=1)[0] if "::" in test else test


def _by_task_id(statuses: Statuses, framework: str) -> Statuses:
    """Return statuses under the whole ids and, for pytest, under those of the harness."""
    if framework not in ("pytest", "pytest-options", "matplotlib"):
        return statuses
    change = {"pytest-options": short_option, "matplotlib": mouse_number}.get(framework, str)
    short = worst((change(cut_id(test)), status) for test, status in statuses.items())
    return {**short, **{test: status for test, status in statuses.items() if test not in short}}


def expected_failures(
    statuses: Statuses, tests: Sequence[str], framework: str = "pytest"
) -> dict[str, Status]:
    """Return the status of those tests of a gold run that ended as XFAIL or XPASS."""
    known = _by_task_id(statuses, framework)
    found = {test: known[test] for test in tests if test in known}
    return {test: status for test, status in found.items() if status in ("XFAIL", "XPASS")}


def _passes(tests: Sequence[str], known: Statuses, gold: Statuses | None) -> dict[str, bool]:
    def passes(test: str) -> bool:
        status = known.get(test)
        if status in ("XFAIL", "XPASS") and gold is not None:
            return gold.get(test) == status
        return status in ("PASSED", "XFAIL")

    return {test: passes(test) for test in tests}


def _is_noise(test: str) -> bool:
    return test.startswith("[")


def _share(passes: dict[str, bool], *, empty: float) -> float:
    return sum(passes.values()) / len(passes) if passes else empty


def _resolution(to_mend: float, to_keep: float) -> Resolution:
    if to_keep < 1 or to_mend == 0:
        return "none"
    return "full" if to_mend == 1 else "partial"
