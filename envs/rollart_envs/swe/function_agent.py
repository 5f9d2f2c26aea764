"""``swe/FunctionRepairAgent-v1``: the tasks of ``swe/FunctionRepair-v1`` for any agent program.

Takes: a program, as a command in a sandbox. Gives: 1 if the function that it leaves in
``solution.py`` passes the hidden test. Never: has the test in the sandbox while the program runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any, Final

import numpy as np

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_envs.swe.config import FunctionAgentConfig
from rollart_envs.swe.function_task import FunctionTask, candidate_of
from rollart_envs.swe.judging import expect_gold
from rollart_envs.swe.taskbook import function_tasks, own_file
from rollart_sandboxes.judging.functions import JudgeInterpreter, find_python, judge
from rollart_sandboxes.pool.lease import Command, SandboxAgent
from rollart_sandboxes.pool.source import sandbox_source

SOLUTION: Final = "solution.py"
_MOST_BYTES: Final = 1 << 20
"""Maximum size of a solution; a larger one is cut."""


class FunctionRepairAgent(SandboxAgent):
    """Let a program fix a function; see :class:`rollart_envs.swe.config.FunctionAgentConfig`."""

    def __init__(self, **options: Any) -> None:
        self.config = FunctionAgentConfig.model_validate(options)
        super().__init__(sandbox_source(self.config.sandbox, self.config.pool))
        self._book = function_tasks(self.config.tasks or own_file("function_tasks.jsonl"))
        self._interpreter = JudgeInterpreter(self.config.python, self.config.test_timeout_s)
        self._task: FunctionTask | None = None

    @property
    def task(self) -> FunctionTask:
        """The current task."""
        if self._task is None:
            raise RuntimeError("there is no task: call prepare() first")
        return self._task

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._book.ids(split))

    async def begin(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Put the function with its bug into a sandbox."""
        self._task = self._book.choose(options, np.random.default_rng(seed))
        sandbox = await self.open_sandbox()
        if not self._interpreter.path:
            self._interpreter = replace(self._interpreter, path=await find_python(sandbox))
        await sandbox.write_file(SOLUTION, self.task.buggy_code.encode())
        return AgentStart(_statement(self.task), {"instance": self.task.task_id})

    async def command(self, endpoint: Endpoint) -> Command:
        """Return the command of the program, with its task."""
        told = {"{task}": _statement(self.task), "{model}": endpoint.model}
        argv = self.config.program or (self._interpreter.path, "-c", _small_agent(), "{task}")
        for mark, text in told.items():
            argv = tuple(word.replace(mark, text) for word in argv)
        return Command(argv, self.config.program_s, env=self.config.env)

    async def judge(self, recorded: Recorded) -> AgentResult:
        """Run the hidden test on the current ``solution.py``."""
        try:
            source = await self.sandbox.read_file(SOLUTION)
        except (OSError, ValueError):  # removed, a folder, or too large
            source = b""
        candidate = source[:_MOST_BYTES].decode("utf-8", "replace")
        passed = False
        if self.task.entry_point in candidate:
            judgement = await judge(self.sandbox, self.task.hidden, candidate, self._interpreter)
            if judgement.verdict == "error":
                await self._give_back()  # never wait for a sandbox while holding another
                await expect_gold(self._sandboxes, self.task, self._interpreter)
            passed = judgement.verdict == "passed"
        return AgentResult(float(passed), passed, {"passed": float(passed)})

    async def solve(self) -> None:
        """Write the task's own solution."""
        from rollart_core.rollout import loop

        await loop.on_loop(self.sandbox.write_file(SOLUTION, self.task.gold_code.encode()))

    def secrets(self) -> tuple[str, ...]:
        """Return the hidden test, and the lines that the solution adds to the file."""
        seen = {line.strip() for line in self.task.buggy_code.splitlines()}
        lines = self.task.canonical_solution.splitlines()
        mended = "\n".join(line.strip() for line in lines if line.strip() not in seen)
        return tuple(text for text in (self.task.test.strip(), mended) if text)

    def corpus(self) -> Iterator[str]:
        """Yield the prompts and answers of the tasks of ``train``."""
        for name in self._book.ids("train"):
            task = self._book.tasks[name]
            yield f"{_statement(task)}\n```python\n{task.buggy_code.strip()}\n```"
            yield f"```python\n{candidate_of(task.gold_code).strip()}\n```"


def _statement(task: FunctionTask) -> str:
    return (
        f"{task.instruction.strip()}\n\n"
        f"The function `{task.entry_point}` in the file {SOLUTION} of the working folder has a bug."
        " Mend it there.\n"
    )


def _small_agent() -> str:
    return files(__package__).joinpath("small_agent.py").read_text("utf-8")
