"""``swe/RepairAgent-v1``: the tasks of ``swe/Repair-v1`` for any agent program.

Takes: a program, as a command in a sandbox with the repository. Gives: the grade of the changes
that it leaves, judged in another sandbox. Never: has the hidden tests in the program's sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.errors import EnvironmentFailure
from rollart_core.rollout import loop
from rollart_envs.swe.config import RepairAgentConfig
from rollart_envs.swe.repair_episode import (
    RepairEpisode,
    RepairTasks,
    components_of,
    expert_actions,
    expert_commands,
    statement,
)
from rollart_envs.swe.tools import SHELL_ENV
from rollart_envs.swe.workspace import WORK_REPO
from rollart_sandboxes.pool.lease import Command, SandboxAgent
from rollart_sandboxes.pool.source import sandbox_source


class RepairAgent(SandboxAgent):
    """Let a program fix a repository; see :class:`rollart_envs.swe.config.RepairAgentConfig`."""

    def __init__(self, **options: Any) -> None:
        self.config = RepairAgentConfig.model_validate(options)
        super().__init__(sandbox_source(self.config.sandbox, self.config.pool))
        self._tasks = RepairTasks(self.config, self._sandboxes)
        self._episode: RepairEpisode | None = None

    @property
    def episode(self) -> RepairEpisode:
        """The current episode."""
        if self._episode is None:
            raise RuntimeError("there is no task: call prepare() first")
        return self._episode

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._tasks.book.ids(split))

    async def begin(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Put the repository at its base commit into a sandbox."""
        task = self._tasks.choose(options, np.random.default_rng(seed))
        self._episode = await self._tasks.start(self.open_sandbox, task)
        return AgentStart(self._episode.statement, {"instance": task.instance_id})

    async def command(self, endpoint: Endpoint) -> Command:
        """Return the command of the program, with its task."""
        told = {"{task}": self.episode.statement, "{model}": endpoint.model}
        argv = self.config.program or ("python3", "-I", "-c", _small_agent(), "{task}")
        for mark, text in told.items():
            argv = tuple(word.replace(mark, text) for word in argv)
        return Command(
            argv,
            self.config.program_s,
            env={**SHELL_ENV, "PATH": self.episode.path, **self.config.env},
            cwd=self.episode.workspace.repo_dir,
        )

    async def judge(self, recorded: Recorded) -> AgentResult:
        """Grade the changes in the repository."""
        report = await self._tasks.graded(self.episode, self.sandbox, self._give_back)
        grade = report.grade
        return AgentResult(grade.reward, grade.resolution == "full", components_of(report))

    async def solve(self) -> None:
        """Apply the task's gold patch."""
        await loop.on_loop(self._apply_gold())

    def secrets(self) -> tuple[str, ...]:
        """Return the gold patch and the hidden tests."""
        return self.episode.task.secrets()

    def corpus(self) -> Iterator[str]:
        """Yield the prompts of the tasks of ``train``, and the actions of an expert."""
        for name in self._tasks.book.ids("train"):
            task = self._tasks.book.tasks[name]
            yield statement(task, WORK_REPO)
            yield from expert_actions(task)

    async def _apply_gold(self) -> None:
        for command in expert_commands(self.episode.task):
            done = await self.sandbox.exec(
                ("bash", "-c", command), timeout_s=60, cwd=self.episode.workspace.repo_dir
            )
            if done.exit_code != 0:
                said = done.stderr.decode(errors="replace")[-300:]
                raise EnvironmentFailure(f"git apply failed: {said}", boundary="swe.solve")


def _small_agent() -> str:
    return files(__package__).joinpath("small_shell_agent.py").read_text("utf-8")
