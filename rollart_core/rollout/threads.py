"""A pool of daemon threads for calls that may never return.

The standard pool joins its threads when the interpreter ends, so one hung call would hang the exit.
These threads die with the process, grow on demand, and a hung one is written off and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs blocking calls for an asyncio loop on at most ``max_threads`` live threads."""

    def __init__(self, max_threads: int, name: str = "env") -> None:
        """Make the pool; threads start with the first calls."""
        self._max_threads = max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0
        self.num_hung = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a thread; cancelling the wait writes the thread off as hung."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(function, future, loop)
        with self._lock:
            self._num_busy += 1
            if self._num_threads < min(self._max_threads, self._num_busy):
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._write_off(job)
            raise

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _write_off(self, job: _Job[T]) -> None:
        with self._lock:
            if job.started and not job.finished:
                job.written_off = True
                self.num_hung += 1
                self._num_threads -= 1
                self._num_busy -= 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            with self._lock:
                job.finished = True
                if job.written_off:
                    self.num_hung -= 1
                    return
                self._num_busy -= 1


class _Job(Generic[T]):
    """One call: what to run and where its answer goes."""

    __slots__ = ("_function", "_future", "_loop", "finished", "started", "written_off")

    def __init__(
        self, function: Callable[[], T], future: asyncio.Future[T], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._function = function
        self._future = future
        self._loop = loop
        self.started = self.finished = self.written_off = False

    def run(self) -> None:
        if self._future.cancelled():
            return
        self.started = True
        try:
            value = self._function()
        except BaseException as e:
            self._settle(partial(_set_exception, self._future, e))
        else:
            self._settle(partial(_set_result, self._future, value))

    def _settle(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback)


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
