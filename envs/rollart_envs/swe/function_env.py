"""``swe/FunctionRepair-v1``: one buggy function, judged by a hidden test in a sandbox.

Takes: answers with the fixed function in a fenced block. Gives: 1 if it passes; after an answer
that fails, the kind of failure and another turn. Never: shows the hidden test, or lets an answer
affect the next one: the sandbox is restored to its original state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from gymnasium.error import ResetNeeded

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import SandboxFailure
from rollart_envs.swe.config import FunctionRepairConfig
from rollart_envs.swe.function_task import FunctionTask, candidate_of
from rollart_envs.swe.generated import UnknownCode, problem_of
from rollart_envs.swe.judging import expect_gold
from rollart_envs.swe.taskbook import function_tasks, generated_functions, own_file
from rollart_sandboxes.judging.functions import JudgeInterpreter, Judgement, find_python, judge
from rollart_sandboxes.pool.lease import Reset, SandboxEnv, Step
from rollart_sandboxes.pool.source import sandbox_source

ASK: Final = "Answer with the whole mended function in one ```python block.\n"
"""The last line of a prompt."""
_RESTORE_S: Final = 5.0


class FunctionRepairEnv(SandboxEnv):
    """Fix a function; see :class:`rollart_envs.swe.config.FunctionRepairConfig`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)

    def __init__(self, **options: Any) -> None:
        self.config = FunctionRepairConfig.model_validate(options)
        super().__init__(sandbox_source(self.config.sandbox, self.config.pool))
        self._is_generated = self.config.num_generated > 0
        self._book = (
            generated_functions(self.config.num_generated)
            if self._is_generated
            else function_tasks(self.config.tasks or own_file("function_tasks.jsonl"))
        )
        self._interpreter = JudgeInterpreter(self.config.python, self.config.test_timeout_s)
        self._task: FunctionTask | None = None
        self._attempts = 0
        self._over = True
        self._clean: str | None = None
        self._is_used = False

    @property
    def task(self) -> FunctionTask:
        """The current task.

        Raises:
            ResetNeeded: If there is none yet.
        """
        if self._task is None:
            raise ResetNeeded("call reset() before the first step")
        return self._task

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._book.ids(split))

    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Start an episode in its own sandbox."""
        self._task = self._book.choose(options, self.np_random)
        self._attempts, self._over = 0, False
        self._clean, self._is_used = None, False
        if not self._is_generated:
            await self.open_sandbox()
        return f"{self.task.statement()}\n{ASK}", self._info(0.0)

    async def act(self, action: str) -> Step:
        """Judge an answer."""
        if not isinstance(action, str):
            raise TypeError(f"an answer is a str, not {action!r:.80}")
        if self._over:
            raise ResetNeeded("the episode is over: call reset()")
        judgement = await self._judgement(action)
        self._attempts += 1
        passed = judgement.verdict == "passed"
        self._over = passed or self._attempts >= self.config.num_attempts
        if self._over:
            await self._give_back()
        left = self.config.num_attempts - self._attempts
        observation = "The function is mended." if passed else self._failed(judgement, left)
        return observation, float(passed), self._over, False, self._info(float(passed))

    def oracle(self) -> str | None:
        """Return the answer with the task's own solution; None if the episode is over."""
        return None if self._over else _answer(self.task.gold_code)

    def secrets(self) -> tuple[str, ...]:
        """Return the hidden test and the solution."""
        return self.task.secrets()

    def corpus(self) -> Iterator[str]:
        """Yield the prompts, answers and failure messages of the tasks of ``train``."""
        for name in self._book.ids("train"):
            task = self._book.tasks[name]
            yield f"{task.statement()}\n{ASK}"
            yield _answer(task.buggy_code)
            yield self._failed(Judgement("failed", told="it returned a wrong result"), left=2)
            yield _answer(task.gold_code)

    async def _judgement(self, answer: str) -> Judgement:
        candidate = candidate_of(answer)
        if self._is_generated:
            try:
                problem = problem_of(self.task, candidate)
                return Judgement("failed" if problem else "passed", told=problem)
            except SyntaxError as error:
                return Judgement("failed", told=f"it is not valid Python: {error}")
            except UnknownCode:
                pass  # for the sandbox
        return await self._judged(candidate)

    async def _judged(self, candidate: str) -> Judgement:
        name = self.task.entry_point
        if name not in candidate:
            return Judgement("failed", told=f"your answer does not define `{name}`")
        sandbox = await self._clean_sandbox()
        if not self._interpreter.path:
            self._interpreter = replace(self._interpreter, path=await find_python(sandbox))
        self._is_used = True
        judgement = await judge(sandbox, self.task.hidden, candidate, self._interpreter)
        if judgement.verdict == "error":
            await self._give_back()  # never wait for a sandbox while holding another
            self._clean = None
            await expect_gold(self._sandboxes, self.task, self._interpreter)
        return judgement

    async def _clean_sandbox(self) -> Sandbox:
        """Return the sandbox without traces of earlier answers, or a new one."""
        if self._is_used and not await self._restored():
            await self._give_back()
            self._clean = None
        sandbox = self._sandbox or await self.open_sandbox()
        if self._clean is None and self._attempts + 1 < self.config.num_attempts:
            self._clean = await sandbox.snapshot()
        return sandbox

    async def _restored(self) -> bool:
        if self._sandbox is None or self._clean is None:
            return False
        try:
            async with asyncio.timeout(_RESTORE_S):
                await self._sandbox.restore(self._clean)
        except (OSError, SandboxFailure, TimeoutError):  # an answer can cause these
            return False
        return True

    def _info(self, reward: float) -> dict[str, Any]:
        return {
            "instance": self.task.task_id,
            "attempts": self._attempts,
            "success": reward == 1.0,
            "reward_components": {"passed": reward},
        }

    def _failed(self, judgement: Judgement, left: int) -> str:
        ask = f"Attempts left: {left}.\n{ASK}" if left > 0 else "No attempt is left."
        return f"The hidden test fails: {judgement.told}. {ask}"


def _answer(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
