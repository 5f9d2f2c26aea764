"""A pool of daemon threads for calls that may never return.

The standard pool joins its threads when the interpreter ends, so one hung call would hang the exit.
These threads die with the process, grow on demand, and a hung one is written off and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from rollart_core.errors import contained

T = TypeVar("T")


class DaemonThreads:
    """Runs blocking calls for an asyncio loop on at most ``max_threads`` live threads.

    Args:
        max_threads: Most calls at once; one that is given up before its turn is not made. None: no
            call waits for another, and each is made.
        name: What the threads are called.
    """

    def __init__(self, max_threads: int | None, name: str = "env") -> None:
        """Make the pool; threads start with the first calls."""
        self._max_threads = math.inf if max_threads is None else max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._num_threads = 0
        self._num_busy = 0
        self.num_hung = 0
        self.num_unwanted = 0
        """Calls that were given up, and whose results are still to be disposed of."""

    async def run(
        self, function: Callable[[], T], *, unwanted: Callable[[T], object] | None = None
    ) -> T:
        """Run ``function`` on a thread; cancelling the wait writes the thread off as hung.

        Args:
            function: What may block.
            unwanted: Disposes, on a thread, of what it returns when nobody waits for that any more.
        """
        job = _Job(function, unwanted, asyncio.get_running_loop())
        with self._lock:
            self._num_busy += 1
            self._add_thread()
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def wait_disposed(self, timeout_s: float) -> None:
        """Block until no unwanted result is left, or the time is up."""
        with self._lock:
            self._lock.wait_for(lambda: not self.num_unwanted, timeout_s)

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _add_thread(self) -> None:
        """Start a thread if a call lacks one and may have it; with the lock held."""
        if self._num_threads < min(self._max_threads, self._num_busy):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, job: _Job[Any]) -> None:
        with self._lock:
            job.is_given_up = True
            if not job.has_begun:
                return
            self.num_unwanted += job.unwanted is not None
            if not job.has_ended:
                self.num_hung += 1
                self._num_threads -= 1
                self._num_busy -= 1
                job.is_written_off = True
                self._add_thread()  # for those that wait for their turn
            elif job.unwanted is not None:  # it came when the wait was being cancelled
                threading.Thread(target=self._dispose, args=(job,), daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                job.has_begun = not job.is_given_up or self._max_threads == math.inf
            if job.has_begun:
                job.call()
            with self._lock:
                job.has_ended = True
                if not job.is_written_off:
                    self._num_busy -= 1
            if job.is_written_off:
                self._dispose(job)
                with self._lock:
                    self.num_hung -= 1
                return
            job.answer()

    def _dispose(self, job: _Job[Any]) -> None:
        """Dispose of what a call that was given up has returned."""
        if job.unwanted is None:
            return
        if job.error is None:
            with contextlib.suppress(BaseException):  # it has had its chance
                job.unwanted(job.value)
        with self._lock:
            self.num_unwanted -= 1
            self._lock.notify_all()


class _Job(Generic[T]):
    """One call: what to run, what came of it, and where its answer goes."""

    __slots__ = (
        "_function",
        "_loop",
        "error",
        "future",
        "has_begun",
        "has_ended",
        "is_given_up",
        "is_written_off",
        "unwanted",
        "value",
    )

    value: T

    def __init__(
        self,
        function: Callable[[], T],
        unwanted: Callable[[T], object] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._function = function
        self._loop = loop
        self.unwanted = unwanted
        self.error: Exception | None = None
        self.future: asyncio.Future[T] = loop.create_future()
        self.has_begun = self.has_ended = self.is_given_up = self.is_written_off = False

    def call(self) -> None:
        try:
            self.value = self._function()
        except BaseException as e:
            self.error = contained(e)

    def answer(self) -> None:
        """Tell who waits; nobody does for a call that was not made."""
        if not self.has_begun:
            return
        if self.error is not None:
            tell = partial(_set_exception, self.future, self.error)
        else:
            tell = partial(_set_result, self.future, self.value)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(tell)


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
