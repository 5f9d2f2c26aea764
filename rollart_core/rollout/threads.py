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
from collections.abc import Callable, Sequence
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
        """Threads that were written off and have not come back."""
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
        batch: _Batch[T] = _Batch([function], unwanted)
        self._begin(batch)
        try:
            await batch.future
        except asyncio.CancelledError:
            self._give_up(batch)
            raise
        (job,) = batch.jobs
        if job.error is not None:
            raise job.error
        return job.value

    async def run_all(
        self, functions: Sequence[Callable[[], T]], deadline_s: float
    ) -> list[T | None]:
        """Run functions that never raise side by side, with one wake-up for all of them.

        Returns:
            Their answers in order; None for what was not there within ``deadline_s``.
        """
        batch: _Batch[T] = _Batch(functions)
        self._begin(batch)
        timer = batch.loop.call_later(deadline_s, batch.settle)
        try:
            await batch.future
        finally:
            timer.cancel()
            answers = self._give_up(batch)
        return answers

    def wait_disposed(self, timeout_s: float) -> None:
        """Block until no unwanted result is left, or the time is up."""
        with self._lock:
            self._lock.wait_for(lambda: not self.num_unwanted, timeout_s)

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _begin(self, batch: _Batch[Any]) -> None:
        with self._lock:
            self._num_busy += len(batch.jobs)
            self._add_threads()
        for job in batch.jobs:
            self._jobs.put(job)

    def _add_threads(self) -> None:
        """Start what threads the calls lack and may have; with the lock held."""
        while self._num_threads < min(self._max_threads, self._num_busy):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, batch: _Batch[T]) -> list[T | None]:
        """Leave a batch: what still runs is hung; returns what has ended."""
        with self._lock:
            batch.is_given_up = True
            for job in batch.jobs:
                if not job.has_begun:
                    continue
                is_unwanted = batch.unwanted is not None
                self.num_unwanted += is_unwanted
                if not job.has_ended:
                    self.num_hung += 1
                    self._num_threads -= 1
                    self._num_busy -= 1
                    job.is_written_off = True
                elif is_unwanted:  # it came when the wait was being cancelled
                    threading.Thread(target=self._dispose, args=(job,), daemon=True).start()
            self._add_threads()  # for those that wait for their turn
            return [job.value if job.has_ended and not job.error else None for job in batch.jobs]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.batch.is_given_up and self._max_threads < math.inf:
                    self._num_busy -= 1
                    continue
                job.has_begun = True
            try:
                job.value = job.function()
            except BaseException as e:
                job.error = contained(e)
            with self._lock:
                job.has_ended = True
                if not job.is_written_off:
                    self._num_busy -= 1
                    job.batch.num_left -= 1
                is_last = not job.batch.num_left
            if job.is_written_off:
                self._dispose(job)
                with self._lock:
                    self.num_hung -= 1
                return
            if is_last:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    job.batch.loop.call_soon_threadsafe(job.batch.settle)

    def _dispose(self, job: _Job[Any]) -> None:
        """Dispose of what a call that was given up has returned."""
        unwanted = job.batch.unwanted
        if unwanted is None:
            return
        if job.error is None:
            with contextlib.suppress(BaseException):  # it has had its chance
                unwanted(job.value)
        with self._lock:
            self.num_unwanted -= 1
            self._lock.notify_all()


class _Batch(Generic[T]):
    """Calls that somebody waits for together."""

    __slots__ = ("future", "is_given_up", "jobs", "loop", "num_left", "unwanted")

    def __init__(
        self,
        functions: Sequence[Callable[[], T]],
        unwanted: Callable[[T], object] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.jobs = [_Job(self, function) for function in functions]
        self.num_left = len(self.jobs)
        self.unwanted = unwanted
        self.is_given_up = False

    def settle(self) -> None:
        """Wake who waits."""
        if not self.future.done():
            self.future.set_result(None)


class _Job(Generic[T]):
    """One call: what to run, and what came of it."""

    __slots__ = (
        "batch",
        "error",
        "function",
        "has_begun",
        "has_ended",
        "is_written_off",
        "value",
    )

    value: T

    def __init__(self, batch: _Batch[T], function: Callable[[], T]) -> None:
        self.batch, self.function = batch, function
        self.error: Exception | None = None
        self.has_begun = self.has_ended = self.is_written_off = False
