"""One agent task and the thread it lives in.

Takes: an :class:`rollart_core.contracts.agent.AgentTask`. Gives: its coroutines, awaited from the
env worker's loop, and an end that waits for theirs. Never: lets a program that blocks block
anything but its own thread.

Programs are whatever their authors wrote: one that calls a blocking client in its coroutine is as
welcome as one that awaits. So each task has an event loop of its own, in a daemon thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from rollart_core.contracts.agent import (
    AgentResult,
    AgentStart,
    AgentTask,
    Endpoint,
    HasSolution,
    Recorded,
)
from rollart_core.errors import EnvironmentFailure, contained, is_from_outside
from rollart_core.rollout.loop import LoopThread

T = TypeVar("T")


class AgentHost:
    """Runs one agent task; see the module.

    Args:
        task: The task; nothing else calls it.
    """

    def __init__(self, task: AgentTask) -> None:
        self._task = task
        self._loop = LoopThread("agent")
        self._program: Future[None] | None = None
        self._is_stopped = False
        self._is_given_up = False

    @property
    def can_solve(self) -> bool:
        """Whether the task knows how it is done."""
        return callable(getattr(self._task, "solve", None))

    @property
    def hangs(self) -> bool:
        """True while it blocks its thread after it was told to end."""
        return self._is_given_up and self._loop.is_alive

    async def prepare(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode."""
        start = await self._await(lambda: self._task.prepare(seed=seed, options=options))
        if not isinstance(start, AgentStart):
            raise TypeError(f"prepare must return AgentStart, not {type(start).__name__}")
        return start

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program; returns also when :meth:`stop` has ended it."""
        self._is_stopped = False
        self._program = self._loop.submit(_called(lambda: self._task.run(endpoint)))
        try:
            await asyncio.wrap_future(self._program)
        except (Exception, asyncio.CancelledError):
            me = asyncio.current_task()
            if not self._is_stopped or (me is not None and me.cancelling()):
                raise
        finally:
            self._program = None

    async def solve(self) -> None:
        """Do what an expert would, in place of the program.

        Raises:
            TypeError: When the task does not know how it is done.
        """
        if not self.can_solve:
            raise TypeError(f"{type(self._task).__name__} has no solve()")
        task = cast("HasSolution", self._task)
        await self._await(task.solve)

    async def stop(self) -> None:
        """End the program, if it runs, and wait for its end.

        Raises:
            EnvironmentFailure: When it does not end.
        """
        if self._program is None:
            return
        self._is_stopped = True
        if not await self.quiet():
            raise EnvironmentFailure("the program does not end", boundary="agent.stop")

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge the episode."""
        result = await self._await(lambda: self._task.finish(recorded))
        if not isinstance(result, AgentResult):
            raise TypeError(f"finish must return AgentResult, not {type(result).__name__}")
        return result

    async def quiet(self) -> bool:
        """Cancel all that runs in the thread and wait; False when it does not end."""
        has_ended = await self._loop.end_tasks()
        self._is_given_up |= not has_ended
        return has_ended

    def close(self) -> None:
        """Close the task, and let the thread end; blocks for as long as the task does."""
        try:
            self._task.close()
        finally:
            self._loop.close()

    async def _await(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._loop.wait(_called(call))


async def _called(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call it in the thread: what is not a coroutine function may block or raise there."""
    try:
        return await call()
    except BaseException as e:
        if is_from_outside(e):
            raise
        raise contained(e) from e  # a program's sys.exit ends the program
