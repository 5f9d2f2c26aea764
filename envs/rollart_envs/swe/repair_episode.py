"""An episode of a repository task: its workspace in a sandbox, its prompt and its grade.

Takes: the options of a repair environment. Gives: a :class:`RepairEpisode`, and the
:class:`Report` on what is left in its sandbox. Never: has the
hidden tests or the repository's history in that sandbox, or judges in it.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollart_core.contracts.sandbox import Sandbox
from rollart_envs.swe.acceptable import run_of
from rollart_envs.swe.config import RepairOptions
from rollart_envs.swe.patch import PatchError, extract_patch, file_changes
from rollart_envs.swe.repair_judge import Report, judge_patch
from rollart_envs.swe.repository import RepositoryTree, base_tree
from rollart_envs.swe.task import RepairTask
from rollart_envs.swe.taskbook import own_file, repair_tasks
from rollart_envs.swe.tools import SUBMIT
from rollart_envs.swe.workspace import Needs, Workspace, needs_of, sandbox_options, unpack
from rollart_sandboxes.pool.source import SandboxSource

_COMMANDS_S: Final = 60.0
_COMMANDS: Final = """
set -e
printf %s "$2:$PATH"
exports=$1 folder=$2 python=$3 pytest=$4
[ -n "$python" ] || python=$(command -v python3) || exit 0
mkdir -p "$folder"
put() {
    printf '#!/bin/sh\\n%s\\nexec %s "$@"\\n' "$exports" "$2" > "$folder/$1"
    chmod 755 "$folder/$1"
}
put python "'$python'"
put python3 "'$python'"
if [ -n "$pytest" ] || [ -x "${python%/*}/pytest" ]; then put pytest "'$python' -m pytest"; fi
"""


@dataclass(frozen=True, slots=True)
class RepairEpisode:
    """A task whose repository is in a sandbox."""

    task: RepairTask
    tree: RepositoryTree | None
    """The base commit; None: the task's image has it."""
    needs: Needs
    workspace: Workspace
    path: str
    """PATH for the agent; it starts with a folder that has the task's ``python`` and ``pytest``."""

    @property
    def statement(self) -> str:
        """What the agent must do, without the format of its answers."""
        return statement(self.task, self.workspace.repo_dir)


class RepairTasks:
    """The tasks of a repair environment: starts and grades episodes.

    Args:
        config: The options of the environment.
        sandboxes: The source of the sandboxes that judge.
    """

    def __init__(self, config: RepairOptions, sandboxes: SandboxSource) -> None:
        self._config, self._sandboxes = config, sandboxes
        self._file = config.tasks or own_file("repair_tasks.jsonl")
        self._repos_dir = config.repos_dir or self._file.parent / "repos"
        self.book = repair_tasks(self._file)

    def choose(self, options: Mapping[str, Any], draw: np.random.Generator) -> RepairTask:
        """Return the task that reset's options select.

        Raises:
            ValueError: If there is no such task.
            TaskFailure: If its row does not determine how its tests run.
        """
        task = self.book.choose(options, draw)
        run_of(task)  # fail now, not at the end
        return task

    async def start(
        self, open_sandbox: Callable[..., Awaitable[Sandbox]], task: RepairTask
    ) -> RepairEpisode:
        """Put a task's repository at its base commit into a new sandbox."""
        tree = await asyncio.to_thread(base_tree, task, self._repos_dir)
        needs = needs_of(task, beside=self._file.parent, python=self._config.python)
        sandbox = await open_sandbox(**sandbox_options(self._sandboxes, task, needs))
        workspace = await unpack(sandbox, task, tree, needs)
        path = await _put_commands(sandbox, workspace, needs)
        return RepairEpisode(task, tree, needs, workspace, path)

    async def graded(
        self, episode: RepairEpisode, sandbox: Sandbox, give_back: Callable[[], Awaitable[None]]
    ) -> Report:
        """Extract the patch from the agent's sandbox, return it, and judge in another one.

        Args:
            episode: The episode.
            sandbox: The agent's sandbox.
            give_back: Returns it, because no episode waits for a sandbox while it holds another.
        """
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
            await give_back()
        if not patch.strip():
            return Report.none(episode.task, "nothing was changed")
        return await judge_patch(
            self._sandboxes,
            episode.task,
            episode.tree,
            patch,
            episode.needs,
            timeout_s=self._config.test_timeout_s,
            parity=self._config.judge == "parity",
        )


def statement(task: RepairTask, repo_dir: str) -> str:
    """Return what the agent must do."""
    return (
        f"The repository {task.repo} lies in {repo_dir}. Mend this issue in it:\n\n"
        f"{task.problem_statement.strip()}\n\n"
        "Tests that you do not see will judge the change; changes of tests and of what configures "
        "them do not count.\n"
    )


def expert_actions(task: RepairTask) -> Iterator[str]:
    """Yield the actions that apply a task's gold patch, then ``submit``."""
    for command in (*expert_commands(task), SUBMIT):
        yield fenced("bash", command)


def expert_commands(task: RepairTask) -> Iterator[str]:
    """Yield the shell commands that apply a task's gold patch, file by file."""
    for change in file_changes(task.patch):
        lines = change.text.removesuffix("\n")
        mark = "END_OF_PATCH"
        while f"\n{mark}\n" in f"\n{lines}\n":
            mark += "_"
        yield f"git apply --whitespace=nowarn - <<'{mark}'\n{lines}\n{mark}"


def fenced(kind: str, body: str) -> str:
    """Return a fenced block whose fence is longer than those in its body."""
    longest = max((len(run) for run in re.findall(r"^`{3,}", body, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{kind}\n{body}\n{fence}"


def components_of(report: Report | None) -> dict[str, float]:
    """Return the parts of a reward; all are 0 before the end of the episode."""
    if report is None:
        return {"fail_to_pass": 0.0, "pass_to_pass": 0.0}
    grade = report.grade
    return {"fail_to_pass": grade.fail_to_pass, "pass_to_pass": grade.pass_to_pass}


async def _put_commands(sandbox: Sandbox, workspace: Workspace, needs: Needs) -> str:
    """Write ``python``, ``python3`` and ``pytest`` of a task into a folder; return PATH with it.

    They are scripts: a link to a virtual environment's interpreter would not find its packages.
    They set the variables of the task only if these are not set, so that an agent program with its
    own interpreter does not import the task's packages.
    """
    folder = f"{workspace.scratch}/rollart-bin"
    environ = {"PYTHONUNBUFFERED": "1", **needs.environ(workspace.repo_dir)}
    exports = "\n".join(
        f'[ -n "${{{name}+set}}" ] || export {name}={shlex.quote(value)}'
        for name, value in environ.items()
    )
    has_pytest = any((Path(path) / "pytest").is_dir() for path in needs.python_path)
    given = (exports, folder, needs.python, "yes" if has_pytest else "")
    done = await sandbox.exec(("sh", "-c", _COMMANDS, "sh", *given), timeout_s=_COMMANDS_S)
    return done.stdout.decode(errors="surrogateescape")
