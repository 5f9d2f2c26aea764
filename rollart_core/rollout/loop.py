"""Event loops in separate threads, for callers without a loop or with a loop that ends too early.

    LoopThread("name")   one loop, which its owner closes
    submit, run, on_loop the background loop of this process, for sandboxes and MCP servers

Takes: coroutines, from any thread or loop. Gives: their results. Never: keeps a process alive.

A sandbox lives longer than the call that opened it, and the caller's loop may end before the
sandbox. Therefore the background loop ends with the process, after the functions of
:func:`at_exit`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

END_S: Final = 5.0
"""Seconds that cancelled tasks have to end before they are cancelled again."""
_LAST: Final = "the last task of this loop"

_at_exit: list[Callable[[], None]] = []


class LoopThread:
    """An event loop in a daemon thread that starts with the first coroutine.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._is_closing = False
        self._last: Callable[[], Awaitable[None]] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more coroutines."""
        return self._is_closing

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it.

        Raises:
            RuntimeError: If the loop is closed.
        """
        with self._lock:
            if self._is_closing:
                work.close()
                raise RuntimeError(f"the event loop of {self._name!r} is closed")
            return asyncio.run_coroutine_threadsafe(work, self._running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it; must not be called from this loop."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop and await it from any loop."""
        return await asyncio.wrap_future(self.submit(work))

    async def end_tasks(self) -> bool:
        """Cancel all tasks of this loop, from another loop; return whether they end in time."""
        loop = self._loop
        if loop is None or not self.is_alive:
            return True
        ended = asyncio.run_coroutine_threadsafe(_all_ended(), loop)
        try:
            async with asyncio.timeout(END_S):
                await asyncio.wrap_future(ended)
        except TimeoutError:
            return False
        return True

    def close(
        self, last: Callable[[], Awaitable[None]] | None = None, *, wait_s: float | None = 0.0
    ) -> None:
        """End all tasks and the loop; may be called twice.

        Args:
            last: Awaited on the loop after all tasks have ended.
            wait_s: Maximum seconds to wait for the end of the thread; None: no limit.
        """
        with self._lock:
            if not self._is_closing:
                self._is_closing, self._last = True, last
                if self._loop is not None and self._pid == os.getpid():
                    self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._pid != os.getpid():  # a fork has no thread
            self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
            self._thread = threading.Thread(
                target=self._work, args=(self._loop,), name=self._name, daemon=True
            )
            self._thread.start()
        return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._is_closing:
                with suppress(SystemExit, KeyboardInterrupt):  # raised by a task
                    loop.run_forever()
            loop.run_until_complete(loop.create_task(self._end(), name=_LAST))
        finally:
            loop.close()

    async def _end(self) -> None:
        await _all_ended()
        if self._last is not None:
            await self._last()


async def _all_ended() -> None:
    """Cancel all tasks of this loop, except this one and the last, until they have ended."""
    me = asyncio.current_task()
    while others := {t for t in asyncio.all_tasks() if t is not me and t.get_name() != _LAST}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=END_S)


_background: Final = LoopThread("background")
submit: Final = _background.submit
run: Final = _background.run
on_loop: Final = _background.wait


def at_exit(close: Callable[[], None]) -> None:
    """Register a function to call when the process ends, also in workers, which skip ``atexit``."""
    if not _at_exit:
        atexit.register(run_exit_functions)
    if close not in _at_exit:
        _at_exit.append(close)


def run_exit_functions() -> None:
    """Call each function of :func:`at_exit` once; errors are ignored."""
    while _at_exit:
        with suppress(Exception):
            _at_exit.pop()()
