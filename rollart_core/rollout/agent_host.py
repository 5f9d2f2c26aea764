"""One agent task and the thread it lives in.

Takes: an :class:`rollart_core.contracts.agent.AgentTask`. Gives: its coroutines, awaited from the
env worker's loop, and an end that waits for theirs. Never: lets a program that blocks block
anything but its own thread.

Programs are whatever their authors wrote: one that calls a blocking client in its coroutine is as
welcome as one that awaits. So each task has an event loop of its own, in a daemon thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar, cast

from rollart_core.contracts.agent import (
    AgentResult,
    AgentStart,
    AgentTask,
    Endpoint,
    HasSolution,
    Recorded,
)
from rollart_core.errors import EnvironmentFailure, contained, is_from_outside

T = TypeVar("T")
END_S: Final = 5.0
"""How long a cancelled program may take to end."""
_LAST: Final = "the last task of this loop"


class AgentHost:
    """Runs one agent task; see the module.

    Args:
        task: The task; nothing else calls it.
    """

    def __init__(self, task: AgentTask) -> None:
        self._task = task
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="agent", daemon=True)
        self._thread.start()
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
        return self._is_given_up and self._thread.is_alive()

    async def prepare(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode."""
        start = await self._await(lambda: self._task.prepare(seed=seed, options=options))
        if not isinstance(start, AgentStart):
            raise TypeError(f"prepare must return AgentStart, not {type(start).__name__}")
        return start

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program; returns also when :meth:`stop` has ended it."""
        self._is_stopped = False
        self._program = asyncio.run_coroutine_threadsafe(
            _called(lambda: self._task.run(endpoint)), self._loop
        )
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
        if not self._thread.is_alive():
            return True
        ended = asyncio.run_coroutine_threadsafe(_all_ended(), self._loop)
        try:
            async with asyncio.timeout(END_S):
                await asyncio.wrap_future(ended)
        except TimeoutError:
            self._is_given_up = True
            return False
        return True

    def close(self) -> None:
        """Close the task, and let the thread end; blocks for as long as the task does."""
        try:
            self._task.close()
        finally:
            with contextlib.suppress(RuntimeError):  # ended before
                self._loop.call_soon_threadsafe(self._let_go)

    async def _await(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_called(call), self._loop)
        )

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_closing:
                with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of some task's own
                    self._loop.run_forever()
            self._loop.run_until_complete(self._loop.create_task(_all_ended(), name=_LAST))
        finally:
            self._loop.close()

    def _let_go(self) -> None:
        self._is_closing = True
        self._loop.stop()


async def _called(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call it in the thread: what is not a coroutine function may block or raise there."""
    try:
        return await call()
    except BaseException as e:
        if is_from_outside(e):
            raise
        raise contained(e) from e  # a program's sys.exit ends the program


async def _all_ended() -> None:
    """Cancel all tasks of this loop but oneself and its last, until they have ended."""
    me = asyncio.current_task()
    while others := {t for t in asyncio.all_tasks() if t is not me and t.get_name() != _LAST}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=END_S)
