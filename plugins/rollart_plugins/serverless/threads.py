"""The requests of a call, scored side by side on daemon threads, with one wake-up for all of them.

Takes: functions that answer and never raise. Gives: their answers in order, None for what was not
there in time. Never: waits for a thread that hangs: it is written off, and replaced when needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ScoringThreads:
    """At most ``num_threads`` live threads; they start with the first calls."""

    def __init__(self, num_threads: int) -> None:
        self._most = num_threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_open = 0
        self.num_hung = 0
        """Threads that were written off and have not come back."""

    async def run(self, functions: Sequence[Callable[[], T]], deadline_s: float) -> list[T | None]:
        """Call all functions; what has not answered within ``deadline_s`` is given up."""
        loop = asyncio.get_running_loop()
        batch: _Batch[T] = _Batch(loop, len(functions))
        jobs = [_Job(batch, place, function) for place, function in enumerate(functions)]
        self._grow(len(jobs))
        for job in jobs:
            self._jobs.put(job)
        timer = loop.call_later(deadline_s, batch.settle)
        try:
            await batch.future
        finally:
            timer.cancel()
            self._write_off(batch, jobs)
        return list(batch.answers)

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _grow(self, num: int) -> None:
        with self._lock:
            self._num_open += num
            self._add_threads()

    def _add_threads(self) -> None:
        """Start what threads the open jobs lack and may have; with the lock held."""
        for _ in range(min(self._most, self._num_open) - self._num_threads):
            self._num_threads += 1
            threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _write_off(self, batch: _Batch[Any], jobs: Sequence[_Job]) -> None:
        """Leave a batch: what still runs is hung, what has not begun never will."""
        with self._lock:
            batch.over = True
            if not batch.num_left:
                return
            for job in jobs:
                if job.began and not job.ended:
                    job.written_off = True
                    self.num_hung += 1
                    self._num_threads -= 1
                    self._num_open -= 1
            self._add_threads()  # for jobs of others, which wait for their turn

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.batch.over:
                    self._num_open -= 1
                    continue
                job.began = True
            answer = job.function()
            with self._lock:
                if job.written_off:
                    self.num_hung -= 1
                    return
                job.ended = True
                self._num_open -= 1
                job.batch.answers[job.place] = answer
                job.batch.num_left -= 1
                last = not job.batch.num_left
            if last:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    job.batch.loop.call_soon_threadsafe(job.batch.settle)


class _Batch(Generic[T]):
    """The functions of one call."""

    __slots__ = ("answers", "future", "loop", "num_left", "over")

    def __init__(self, loop: asyncio.AbstractEventLoop, num: int) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.answers: list[T | None] = [None] * num
        self.num_left = num
        self.over = False

    def settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Job:
    """One function of a batch."""

    __slots__ = ("batch", "began", "ended", "function", "place", "written_off")

    def __init__(self, batch: _Batch[Any], place: int, function: Callable[[], Any]) -> None:
        self.batch, self.place, self.function = batch, place, function
        self.began = self.ended = self.written_off = False
