"""A pool of daemon threads for calls that may never return.

The standard pool joins its threads when the interpreter ends, so one hung call would block the
exit. These threads end with the process and are started on demand. A hung thread is replaced.
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
        max_threads: Maximum number of concurrent calls; a call that is abandoned while it waits
            is not made. None: no limit, and every call is made.
        name: The name of the threads.
    """

    def __init__(self, max_threads: int | None, name: str = "env") -> None:
        """Create the pool; threads start with the first calls."""
        self._max_threads = math.inf if max_threads is None else max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._num_threads = 0
        self._num_busy = 0
        self.num_hung = 0
        """Number of threads whose call was abandoned and has not returned."""
        self.num_unwanted = 0
        """Number of abandoned calls whose results are not disposed of yet."""

    async def run(
        self, function: Callable[[], T], *, unwanted: Callable[[T], object] | None = None
    ) -> T:
        """Run ``function`` on a thread; if the wait is cancelled, the thread counts as hung.

        Args:
            function: A function that may block.
            unwanted: Called on a thread with the result if the wait was cancelled, to dispose of
                it.
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
        """Run functions that never raise concurrently, with one wake-up of the loop.

        Returns:
            Their results in order; None for a function that did not return in ``deadline_s``.
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
        """Block until all unwanted results are disposed of, or the time is up."""
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
        """Start missing threads, up to the limit; the caller must hold the lock."""
        while self._num_threads < min(self._max_threads, self._num_busy):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, batch: _Batch[T]) -> list[T | None]:
        """Abandon a batch: running calls count as hung; return the results of the others."""
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
                elif is_unwanted:  # it returned while the wait was being cancelled
                    threading.Thread(target=self._dispose, args=(job,), daemon=True).start()
            self._add_threads()  # for the calls in the queue
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
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for it
                    job.batch.loop.call_soon_threadsafe(job.batch.settle)

    def _dispose(self, job: _Job[Any]) -> None:
        """Dispose of the result of an abandoned call."""
        unwanted = job.batch.unwanted
        if unwanted is None:
            return
        if job.error is None:
            with contextlib.suppress(BaseException):  # a failed disposal is not retried
                unwanted(job.value)
        with self._lock:
            self.num_unwanted -= 1
            self._lock.notify_all()


class _Batch(Generic[T]):
    """Calls that one caller waits for together."""

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
        """Wake the waiting caller."""
        if not self.future.done():
            self.future.set_result(None)


class _Job(Generic[T]):
    """One call: its function and its result."""

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
