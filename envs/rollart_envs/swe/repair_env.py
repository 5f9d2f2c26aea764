"""``swe/Repair-v1``: fix an issue of a repository with a shell and an editor in a sandbox.

Takes: answers with one fenced action each: a command, an edit, or ``submit``. Gives: its result,
and at the end the grade of the changes, judged in another sandbox. Never: has the hidden tests or
the repository's history in the agent's sandbox.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gymnasium.error import ResetNeeded

from rollart_core.contracts.sandbox import Sandbox
from rollart_envs.swe.acceptable import run_of
from rollart_envs.swe.config import RepairConfig
from rollart_envs.swe.editor import Edit, History
from rollart_envs.swe.patch import PatchError, extract_patch, file_changes
from rollart_envs.swe.repair_judge import Report, judge_patch
from rollart_envs.swe.repository import RepositoryTree, base_tree
from rollart_envs.swe.task import RepairTask
from rollart_envs.swe.taskbook import own_file, repair_tasks
from rollart_envs.swe.tools import (
    HELP,
    SHELL_ENV,
    SUBMIT,
    Action,
    ActionError,
    Bash,
    Submit,
    cut_output,
    parse_action,
)
from rollart_envs.swe.workspace import Needs, Workspace, needs_of, sandbox_options, unpack
from rollart_sandboxes.pool.lease import Reset, SandboxEnv, Step
from rollart_sandboxes.pool.source import sandbox_source

_MAX_EDIT_BYTES: Final = 1 << 20
_COMMAND_BYTES: Final = 1 << 20


class RepairEnv(SandboxEnv):
    """Fix a repository; see :class:`rollart_envs.swe.config.RepairConfig` for the options."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)

    def __init__(self, **options: Any) -> None:
        self.config = RepairConfig.model_validate(options)
        super().__init__(sandbox_source(self.config.sandbox, self.config.pool))
        self._file = self.config.tasks or own_file("repair_tasks.jsonl")
        self._repos_dir = self.config.repos_dir or self._file.parent / "repos"
        self._book = repair_tasks(self._file)
        self._episode: _Episode | None = None

    @property
    def task(self) -> RepairTask:
        """The current task.

        Raises:
            ResetNeeded: If there is none yet.
        """
        return self._present.task

    @property
    def _present(self) -> _Episode:
        if self._episode is None:
            raise ResetNeeded("call reset() before the first step")
        return self._episode

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._book.ids(split))

    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Start an episode: the repository at its base commit, in its own sandbox."""
        task = self._book.choose(options, self.np_random)
        self._episode = None
        run_of(task)  # fail now, not at the end, if the row does not define how its tests run
        tree = await asyncio.to_thread(base_tree, task, self._repos_dir)
        needs = needs_of(task, beside=self._file.parent, python=self.config.python)
        sandbox = await self.open_sandbox(**sandbox_options(self._sandboxes, task, needs))
        workspace = await unpack(sandbox, task, tree, needs)
        self._episode = _Episode(task, tree, needs, workspace)
        return _prompt(task, workspace), self._info(None)

    async def act(self, action: str) -> Step:
        """Carry out one action; ``submit``, or the last turn, ends the episode with a grade."""
        if not isinstance(action, str):
            raise TypeError(f"an answer is a str, not {action!r:.80}")
        episode = self._present
        if episode.is_over or self._sandbox is None:
            raise ResetNeeded("the episode is over: call reset()")
        episode.num_turns += 1
        said = ""
        try:
            parsed = parse_action(action)
        except ActionError as error:
            parsed, said = None, str(error)
        if parsed is not None and not isinstance(parsed, Submit):
            said = await self._do(self._sandbox, parsed)
            episode.expert_done(action)
        if not isinstance(parsed, Submit) and episode.num_turns < self.config.max_turns:
            return said, 0.0, False, False, self._info(None)
        report = await self._graded(self._sandbox)
        return _verdict(report), report.grade.reward, True, False, self._info(report)

    def oracle(self) -> str | None:
        """Return the next action that applies the gold patch, file by file, then ``submit``."""
        episode = self._present
        return None if episode.is_over else episode.expert[0]

    def secrets(self) -> tuple[str, ...]:
        """Return the gold patch and the hidden tests."""
        return self.task.secrets()

    def corpus(self) -> Iterator[str]:
        """Yield the prompts of the tasks of ``train``, and the expert's actions."""
        for name in self._book.ids("train"):
            task = self._book.tasks[name]
            yield _prompt(task, Workspace("/work/repo", "", ""))
            yield from expert_actions(task)

    async def _do(self, sandbox: Sandbox, action: Action) -> str:
        try:
            if isinstance(action, Bash):
                return await self._command(sandbox, action)
            assert isinstance(action, Edit)
            return await self._edit(sandbox, action)
        except OSError as error:  # the sandbox refuses it, for example if a folder is gone
            return f"That could not be done: {error.strerror or error}"

    async def _command(self, sandbox: Sandbox, action: Bash) -> str:
        episode = self._present
        repo_dir = episode.workspace.repo_dir
        result = await sandbox.exec(
            action.argv,
            timeout_s=self.config.command_timeout_s,
            cwd=repo_dir,
            env={**SHELL_ENV, **episode.needs.environ(repo_dir)},
            max_output_bytes=_COMMAND_BYTES,
        )
        text = (result.stdout + result.stderr).decode("utf-8", "replace")
        if result.timed_out:
            text += f"\n(stopped after {self.config.command_timeout_s:g} s)"
        elif result.exit_code != 0:
            text += f"\n(exit code {result.exit_code})"
        return cut_output(text.strip("\n"), self.config.max_output_chars) or "(no output)"

    async def _edit(self, sandbox: Sandbox, edit: Edit) -> str:
        episode = self._present
        path = str(Path(episode.workspace.repo_dir, edit.path))
        try:
            content = await sandbox.read_file(path)
        except FileNotFoundError:
            text = None
        else:
            if len(content) > _MAX_EDIT_BYTES:
                return f"{edit.path} is too large for the editor."
            try:
                text = content.decode()
            except UnicodeDecodeError:
                return f"{edit.path} is no text in UTF-8."
        edited = episode.history.apply(edit, text)
        if edited.text != text:
            await self._write(sandbox, path, edited.text, was_there=text is not None)
        return cut_output(edited.message, self.config.max_output_chars)

    async def _write(
        self, sandbox: Sandbox, path: str, text: str | None, *, was_there: bool
    ) -> None:
        if text is None:
            await sandbox.exec(("rm", "-f", "--", path), timeout_s=10)
            return
        mode = 0o644
        if was_there:
            found = await sandbox.exec(("stat", "-L", "-c", "%a", "--", path), timeout_s=10)
            mode = int(found.stdout, 8) if found.exit_code == 0 else mode
        await sandbox.write_file(path, text.encode("utf-8", "surrogateescape"), mode=mode)

    async def _graded(self, sandbox: Sandbox) -> Report:
        """Extract the patch from the agent's sandbox, close it, and judge in another one."""
        episode = self._present
        episode.is_over = True
        workspace = episode.workspace
        try:
            patch = await extract_patch(
                sandbox,
                repo_dir=workspace.repo_dir,
                base=workspace.base,
                index_path=f"{workspace.scratch}/rollart-index",
            )
        except (PatchError, OSError) as error:
            return Report.none(episode.task, f"there is no difference to be had: {error}")
        finally:
            await self._give_back()
        if not patch.strip():
            return Report.none(episode.task, "nothing was changed")
        return await judge_patch(
            self._sandboxes,
            episode.task,
            episode.tree,
            patch,
            episode.needs,
            timeout_s=self.config.test_timeout_s,
            parity=self.config.judge == "parity",
        )

    def _info(self, report: Report | None) -> dict[str, Any]:
        episode = self._episode
        parts = {"fail_to_pass": 0.0, "pass_to_pass": 0.0}
        if report is not None:
            grade = report.grade
            parts = {"fail_to_pass": grade.fail_to_pass, "pass_to_pass": grade.pass_to_pass}
        return {
            "instance": episode.task.instance_id if episode else "",
            "turns": episode.num_turns if episode else 0,
            "success": report is not None and report.grade.resolution == "full",
            "reward_components": parts,
            "resolution": report.grade.resolution if report else "",
        }


class _Episode:
    """The state of an episode."""

    def __init__(
        self, task: RepairTask, tree: RepositoryTree | None, needs: Needs, workspace: Workspace
    ) -> None:
        self.task, self.tree, self.needs, self.workspace = task, tree, needs, workspace
        self.history = History()
        self.num_turns = 0
        self.is_over = False
        self.expert = list(expert_actions(task))
        """The remaining actions of the expert."""

    def expert_done(self, action: str) -> None:
        """Record that an action was carried out, if it was the expert's next one."""
        if len(self.expert) > 1 and action == self.expert[0]:
            del self.expert[0]


def expert_actions(task: RepairTask) -> Iterator[str]:
    """Yield the actions that apply a task's gold patch, then ``submit``."""
    for change in file_changes(task.patch):
        lines = change.text.removesuffix("\n")
        mark = "END_OF_PATCH"
        while f"\n{mark}\n" in f"\n{lines}\n":
            mark += "_"
        yield _fenced(f"git apply --whitespace=nowarn - <<'{mark}'\n{lines}\n{mark}")
    yield _fenced(SUBMIT)


def _fenced(command: str) -> str:
    longest = max((len(run) for run in re.findall(r"^`{3,}", command, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}bash\n{command}\n{fence}"


def _prompt(task: RepairTask, workspace: Workspace) -> str:
    return (
        f"The repository {task.repo} lies in {workspace.repo_dir}. Mend this issue in it:\n\n"
        f"{task.problem_statement.strip()}\n\n"
        "Tests that you do not see will judge the change; changes of tests and of what configures "
        f"them do not count.\n\n{HELP}\n"
    )


def _verdict(report: Report) -> str:
    return {
        "full": "The issue is mended.",
        "partial": "The issue is mended in part.",
        "none": "The issue is not mended.",
    }[report.grade.resolution]
