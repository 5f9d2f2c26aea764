"""The `pool` backend: worker processes of this machine, started on demand and ended when idle.

    call -> pieces -> the least busy worker that has room, or a new one -> answers
                      idle for idle_s: ended | hangs past its deadline: killed, and another started

Takes: calls. Gives: answers, from a reward that is in none of this process's threads: what it does
to its own process (a crash, a lock on the interpreter, a leak) ends one worker. Never: has more
workers than it was told, keeps one that has nothing to do, or leaves one behind when closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from rollart_core.errors import (
    BackendFailure,
    ConfigError,
    EpisodeError,
    UserError,
    described,
    first_line,
)
from rollart_plugins.serverless import carriers
from rollart_plugins.serverless.carriers import Carrier, ProcessCarrier, SandboxCarrier
from rollart_plugins.serverless.config import PoolConfig
from rollart_plugins.serverless.pool_worker import CannotStart, PoolWorker
from rollart_plugins.serverless.remote import RemoteBackend, Sent
from rollart_plugins.serverless.wire import WireAnswer


class PoolBackend(RemoteBackend[PoolConfig]):
    """Runs one reward in worker processes."""

    name = "pool"
    config_model = PoolConfig

    def prepare(self) -> None:
        """Set up an empty pool."""
        config = self.config
        self._most = config.num_workers or _num_cores()
        self._source = carriers.new_source(config.sandbox) if config.sandbox else None
        self._workers: list[PoolWorker] = []
        self._num_starting = 0
        self._waiting: deque[tuple[int, asyncio.Future[PoolWorker]]] = deque()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_started = 0

    async def open(self) -> None:
        """Start a worker, to see that the reward can be made in one.

        Raises:
            ConfigError: When it cannot; says why.
        """
        try:
            worker = await self._lend(0)
        except BackendFailure as e:
            raise ConfigError(f"reward {self.reward.id} on the pool: {e}") from e
        self._settle(worker)

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Have a worker answer.

        Raises:
            BackendFailure: When it could not be started, or died meanwhile.
        """
        worker = await self._lend(weight)
        answer = await worker.ask(next(self._numbers), body, weight=weight, deadline_s=deadline_s)
        return Sent(answer, origin=worker)

    def noted(self, sent: Sent, answer: WireAnswer) -> None:
        """Let a worker go in which a reward hangs."""
        if answer.num_hung and isinstance(sent.origin, PoolWorker):
            sent.origin.retired = True
            self._settle(sent.origin)

    def piece_of(self, num_requests: int) -> int:
        """Return how many of a call's requests go together, so that all workers have some."""
        return min(self._limits.num_requests, -(-num_requests // self._most) or 1)

    def gauges(self) -> Mapping[str, float]:
        """Return how many workers there are, and how many requests they have."""
        return {
            "workers": len(self._workers) + self._num_starting,
            "workers_busy": sum(worker.num_busy for worker in self._workers),
            "workers_waiting": len(self._waiting),
        }

    async def close(self) -> None:
        """End all workers; may be called twice."""
        self._closed = True
        self._fail_waiting(self._is_closed())
        for worker in list(self._workers):
            self._end(worker, kill=worker.num_busy > 0)  # the others may close their reward
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._source is not None:
            from rollart_core.rollout.loop import on_loop

            await on_loop(self._source.close())

    # Lending

    async def _lend(self, weight: int) -> PoolWorker:
        """Return a worker with room for so many requests, which are now its own."""
        if self._closed:
            raise self._is_closed()
        worker = None if self._waiting else self._pick(weight)
        if worker is not None:
            return worker
        future: asyncio.Future[PoolWorker] = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, future))
        self._grow()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().num_busy -= weight
                self._settle(future.result())
            raise

    def _pick(self, weight: int) -> PoolWorker | None:
        """Return the least busy worker, if it has room; another is started if none is free."""
        live = [worker for worker in self._workers if not worker.retired]
        best = min(live, key=lambda worker: worker.num_busy, default=None)
        if best is None or best.num_busy:
            self._grow()
        room = best is not None and best.num_busy + weight <= self.config.num_threads
        if best is None or not (room or best.num_busy == 0):
            return None
        best.num_busy += weight
        return best

    def _serve_waiting(self) -> None:
        while self._waiting:
            weight, future = self._waiting[0]
            if not future.done():
                worker = self._pick(weight)
                if worker is None:
                    return
                future.set_result(worker)
            self._waiting.popleft()

    def _fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _settle(self, worker: PoolWorker) -> None:
        """After each answer: hand its room on, let it go if it is done for, or watch it idle."""
        if worker.retired and not worker.num_busy:
            self._end(worker, kill=True)
        self._serve_waiting()
        if not worker.num_busy and not worker.retired:
            worker.watch_idle(self.config.idle_s, partial(self._end, worker))

    # Starting and ending

    def _grow(self) -> None:
        """Start a worker more if there may be one."""
        num = len([w for w in self._workers if not w.retired]) + self._num_starting
        wanted = max(1, len(self._waiting))
        if num < self._most and not self._closed and self._num_starting < wanted:
            self._num_starting += 1
            self._later(self._start())

    async def _start(self) -> None:
        worker = PoolWorker(self._new_carrier, self._settle, self._lost)
        ref, error = self.reward, None
        hello = {
            "reward": ref.id,
            "options": dict(ref.options),
            "num_threads": self.config.num_threads,
        }
        try:
            async with asyncio.timeout(self.config.start_s):
                await worker.start(hello)
        except TimeoutError:
            error = BackendFailure(f"a worker did not start within {self.config.start_s:g} s")
        except CannotStart as e:
            error = BackendFailure(f"a worker cannot start: {e}", again=False)
        except (EpisodeError, OSError) as e:
            error = BackendFailure(f"a worker cannot start: {first_line(str(e))}")
        except UserError as e:
            error = BackendFailure(f"a worker cannot start: {first_line(str(e))}", again=False)
        except Exception as e:
            error = BackendFailure(f"a worker cannot start: {described(e)}", again=False)
        self._num_starting -= 1
        if error is not None:
            await worker.close(kill=True)
            error.args = (self.clean(str(error)),)
            if not self._workers:
                self._fail_waiting(error)
            return
        self.num_started += 1
        self._workers.append(worker)
        if self._closed:
            self._end(worker, kill=True)
        self._settle(worker)

    def _new_carrier(self, take: Callable[[bytes], None], gone: Callable[[str], None]) -> Carrier:
        if self._source is not None:
            return SandboxCarrier(take, gone, self._source)
        return ProcessCarrier(take, gone)

    def _lost(self, worker: PoolWorker) -> None:
        """A worker is gone, or has to go: it did not answer in time."""
        self._end(worker, kill=True)
        self._serve_waiting()
        if self._waiting:
            self._grow()

    def _end(self, worker: PoolWorker, *, kill: bool = False) -> None:
        worker.retired = True
        if worker in self._workers:
            self._workers.remove(worker)
            self._later(worker.close(kill=kill))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
