"""The `pool` backend: worker processes on this machine, started on demand and stopped when idle.

    call -> pieces -> the least busy worker with is_free, or a new one -> answers
                      idle for idle_s: stopped | hangs past its deadline: killed and replaced

Takes: calls. Gives: answers of a reward that runs in other processes. If the reward damages its
process (a crash, a held interpreter lock, a leak), only one worker ends.
Never: has more workers than configured, keeps an idle one, or leaves one running when closed.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rollart_core.errors import (
    BackendFailure,
    ConfigError,
    EpisodeError,
    UserError,
    WorkerDied,
    described,
    first_line,
)
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import exit_reason, shut_down
from rollart_plugins.serverless.config import WORKER, PoolConfig
from rollart_plugins.serverless.remote import RemoteBackend, Sent
from rollart_plugins.serverless.sandbox_worker import SandboxWorker
from rollart_plugins.serverless.wire import Refused, WireAnswer

if TYPE_CHECKING:
    from rollart_sandboxes.pool.source import SandboxSource

FUNCTION: Final = "rollart_plugins.serverless.function:RewardFunction"
"""The entry point of a worker."""
_GRACE_S: Final = 0.25
"""Time after its deadline in which an answer is still accepted, before the worker is killed."""
_CLOSE_S: Final = 0.02
"""A call that is cancelled this close to its deadline counts as timed out."""


class PoolWorker:
    """One worker of the pool.

    Answers arrive in any order. Pending calls fail if the worker ends. No call waits for a worker
    that exceeded the deadline of a call.

    Args:
        process: Its process, not started yet.
        settle: Called after each answer.
        lost: Called when the process ends, or a deadline has passed.
    """

    def __init__(
        self,
        process: WorkerProcess | SandboxWorker,
        settle: Callable[[PoolWorker], None],
        lost: Callable[[PoolWorker], None],
    ) -> None:
        self._process = process
        self._settle, self._lost = settle, lost
        self._idle: asyncio.TimerHandle | None = None
        self._why_ended = ""
        self.num_busy = 0
        """Number of requests of this worker."""
        self.retired = False
        """True if it receives no more requests."""

    async def start(self, function: Mapping[str, Any]) -> None:
        """Start the worker and wait until it can score.

        Args:
            function: Arguments of its :class:`RewardFunction`.

        Raises:
            UserError: If the reward cannot be created.
            WorkerDied: If the worker ends immediately.
        """
        await self._process.start(FUNCTION, function)
        self._process.on_death = lambda _: self._lost(self)
        if not self._process.alive:
            raise WorkerDied(await exit_reason(self._process))

    def ask(self, body: bytes, *, weight: int, deadline_s: float) -> asyncio.Future[bytes]:
        """Return a future for the answer to a call; BackendFailure if the worker ends.

        Args:
            body: The call.
            weight: Number of its requests, already counted in ``num_busy``.
            deadline_s: Seconds after which a worker that has not answered is killed.
        """
        loop = asyncio.get_running_loop()
        self._stop_watching()
        due_s = loop.time() + deadline_s
        timer = loop.call_at(due_s + _GRACE_S, self._overdue)
        answer: asyncio.Future[bytes] = loop.create_future()
        answer.add_done_callback(partial(self._given_up, due_s=due_s))
        on_answer = partial(self._answered, answer, weight, timer)
        try:  # not awaited: the worker continues with cancelled calls
            self._process.send(on_answer, "answer", body)
        except WorkerDied as e:
            on_answer(None, e)
        return answer

    def watch_idle(self, idle_s: float, end: Callable[[], None]) -> None:
        """Call ``end`` if there is no request for this time."""
        self._stop_watching()
        self._idle = asyncio.get_running_loop().call_later(idle_s, self._look, end)

    async def close(self, *, kill: bool = False) -> None:
        """End the worker; pending calls fail. Can be called twice."""
        self._stop_watching()
        self._process.on_death = None
        if self._process.alive:  # otherwise its calls report how it ended
            self._why_ended = self._why_ended or "the worker was stopped"
        if kill:
            self._process.kill()
            await self._process.close()
        else:
            await shut_down(self._process, "close")  # also closes its reward

    def _overdue(self) -> None:
        """Kill a worker that exceeded the deadline of a call; its calls fail."""
        self._why_ended = "the worker hung past the deadline of a call, and was killed"
        self._lost(self)

    def _answered(
        self,
        answer: asyncio.Future[bytes],
        weight: int,
        timer: asyncio.TimerHandle,
        value: bytes | None,
        error: BaseException | None,
    ) -> None:
        """Set the result of a call, unless its caller was cancelled."""
        timer.cancel()
        self.num_busy -= weight
        if answer.done():
            pass
        elif isinstance(error, WorkerDied):
            answer.set_exception(BackendFailure(self._why_ended or first_line(str(error))))
        elif isinstance(error, Refused):
            answer.set_result(error.body())
        elif error is not None:
            answer.set_result(Refused("internal", described(error)).body())
        else:
            answer.set_result(value or b"")
        self._settle(self)

    def _given_up(self, answer: asyncio.Future[bytes], *, due_s: float) -> None:
        """Retire a worker that should have answered by now; no further call waits for it."""
        if answer.cancelled():
            is_late = asyncio.get_running_loop().time() > due_s - _CLOSE_S
            self.retired = self.retired or is_late

    def _look(self, end: Callable[[], None]) -> None:
        if not self.num_busy:
            end()

    def _stop_watching(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


class PoolBackend(RemoteBackend[PoolConfig]):
    """Runs one reward in worker processes."""

    name = "pool"
    config_model = PoolConfig

    def prepare(self) -> None:
        """Create an empty pool."""
        config = self.config
        self._most = config.num_workers or _num_cores()
        self._source = _sandbox_source(config.sandbox) if config.sandbox else None
        self._workers: list[PoolWorker] = []
        self._num_starting = 0
        self._waiting: deque[tuple[int, asyncio.Future[PoolWorker]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_started = 0

    async def open(self) -> None:
        """Start a worker, to check that the reward can be created in it.

        Raises:
            ConfigError: If it cannot, with the reason.
        """
        try:
            worker = await self._lend(0)
        except BackendFailure as e:
            raise ConfigError(f"reward {self.reward.id} on the pool: {e}") from e
        self._settle(worker)

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Return the answer of a worker.

        Raises:
            BackendFailure: If a worker could not be started, or ended meanwhile.
        """
        worker = await self._lend(weight)
        answer = await worker.ask(body, weight=weight, deadline_s=deadline_s)
        return Sent(answer, origin=worker)

    def noted(self, sent: Sent, answer: WireAnswer) -> None:
        """Retire a worker in which a reward hangs."""
        if answer.num_hung and isinstance(sent.origin, PoolWorker):
            sent.origin.retired = True
            self._settle(sent.origin)

    def piece_of(self, num_requests: int) -> int:
        """Return how many of a call's requests are sent together, so that all workers get some."""
        return min(self._limits.num_requests, -(-num_requests // self._most) or 1)

    def gauges(self) -> Mapping[str, float]:
        """Return the number of workers, and of their requests."""
        return {
            "workers": len(self._workers) + self._num_starting,
            "workers_busy": sum(worker.num_busy for worker in self._workers),
            "workers_waiting": len(self._waiting),
        }

    async def close(self) -> None:
        """Stop all workers; can be called twice."""
        self._closed = True
        self._fail_waiting(self._is_closed())
        for worker in list(self._workers):
            self._end(worker, kill=worker.num_busy > 0)  # idle workers can close their reward
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._source is not None:
            from rollart_core.rollout.loop import on_loop

            await on_loop(self._source.close())

    # Assignment

    async def _lend(self, weight: int) -> PoolWorker:
        """Return a worker with is_free for the requests, which are counted as its own."""
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
        """Return the least busy worker with is_free; start another if none is idle."""
        live = [worker for worker in self._workers if not worker.retired]
        best = min(live, key=lambda worker: worker.num_busy, default=None)
        if best is None or best.num_busy:
            self._grow()
        is_free = best is not None and best.num_busy + weight <= self.config.num_threads
        if best is None or not (is_free or best.num_busy == 0):
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
        """After an answer: serve waiting calls, end a retired worker, or start the idle timer."""
        if worker.retired and not worker.num_busy:
            self._end(worker, kill=True)
        self._serve_waiting()
        if not worker.num_busy and not worker.retired:
            worker.watch_idle(self.config.idle_s, partial(self._end, worker))

    # Starting and ending

    def _grow(self) -> None:
        """Start one more worker if the limit allows it."""
        num = len([w for w in self._workers if not w.retired]) + self._num_starting
        wanted = max(1, len(self._waiting))
        if num < self._most and not self._closed and self._num_starting < wanted:
            self._num_starting += 1
            self._later(self._start())

    async def _start(self) -> None:
        worker = PoolWorker(self._new_process(), self._settle, self._lost)
        ref, error = self.reward, None
        function = {
            "reward_id": ref.id,
            "options": dict(ref.options),
            "num_threads": self.config.num_threads,
        }
        try:
            async with asyncio.timeout(self.config.start_s):
                await worker.start(function)
        except TimeoutError:
            error = BackendFailure(f"a worker did not start within {self.config.start_s:g} s")
        except (EpisodeError, OSError, WorkerDied) as e:
            error = BackendFailure(f"a worker could not start: {first_line(str(e))}")
        except UserError as e:
            error = BackendFailure(f"a worker could not start: {first_line(str(e))}", again=False)
        except Exception as e:
            error = BackendFailure(f"a worker could not start: {described(e)}", again=False)
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

    def _new_process(self) -> WorkerProcess | SandboxWorker:
        if self._source is not None:
            return SandboxWorker(WORKER, self._source)
        variables = {"PYTHONUTF8": "1"}
        return WorkerProcess(WORKER, keep_output=True, own_group=True, environment=variables)

    def _lost(self, worker: PoolWorker) -> None:
        """Remove a worker that has ended, or that did not answer in time."""
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


def _sandbox_source(sandbox: Any) -> SandboxSource:
    """Return the source of sandboxes of this kind."""
    from rollart_sandboxes.pool.source import sandbox_source

    return sandbox_source(sandbox)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
