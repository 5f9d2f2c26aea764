"""Engines, env workers and the trainer in separate processes, with the interfaces of local ones.

    RemoteEngine    one process; if it dies: EngineDied; it restarts with the newest weights
    RemoteWorker    one process; if it dies: WorkerDied; the pool of env workers starts another
    TrainerGroup    one process per rank; if one dies: TrainerLost; ``restart`` starts all again;
                    a batch is stored once, and each rank receives a reference to it

Takes: unstarted workers, and the objects to build in them. Gives: the methods of these objects.
Never: hides that a process died, or leaves ranks waiting in a collective call for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Health,
    InferenceEngine,
    ScoreRequest,
    WeightSwap,
)
from rollart_core.contracts.weights import Publication
from rollart_core.errors import (
    EngineDied,
    OutOfMemory,
    RollartError,
    TrainerLost,
    WorkerDied,
    described,
    first_line,
)
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.runtime.factories import RankArgs
from rollart_core.runtime.heartbeat import Heartbeat, Notify, nobody_listens
from rollart_core.runtime.records import StoreRecords, file_store
from rollart_core.runtime.worker import Worker
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Sample

FIRST_DELAY_S = 0.5
"""Seconds before the second restart of a window; the first restart is immediate."""
LONGEST_DELAY_S = 30.0


@dataclass(slots=True)
class Restarts:
    """Counts the deaths of one worker.

    Args:
        most: Maximum restarts within a window; after one more death the worker is lost.
        window_s: Seconds after which a death no longer counts.
    """

    most: int
    window_s: float
    deaths: list[float] = field(default_factory=list)
    """Times of the deaths that count, in seconds."""

    def died(self, now_s: float) -> float | None:
        """Record a death; return the seconds until the restart, or None for no restart."""
        self.deaths = [t for t in self.deaths if now_s - t < self.window_s] + [now_s]
        if len(self.deaths) > self.most:
            return None
        if len(self.deaths) == 1:
            return 0.0
        doubled: float = FIRST_DELAY_S * 2 ** (len(self.deaths) - 2)
        return min(LONGEST_DELAY_S, doubled)


MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
SHUTDOWN_GRACE_S = 10.0
ABORT_GRACE_S = 5.0
START_LIMIT_S = 600.0
"""A restart that takes longer counts as a death; the limits of the engine are added."""


def _default_restarts() -> Restarts:
    return Restarts(MAX_RESTARTS, RESTART_WINDOW_S)


@dataclass(slots=True)
class RestartPolicy:
    """How a worker is monitored and restarted."""

    heartbeat: Heartbeat | None = None
    restarts: Restarts = field(default_factory=_default_restarts)
    notify: Notify = nobody_listens
    start_limit_s: float = START_LIMIT_S
    """Maximum seconds of a restart."""
    devices: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    """Entered for a restart; waits until the worker may use its devices."""


class RemoteEngine(InferenceEngine):
    """An inference engine in a process that is restarted when it dies.

    Args:
        process: Returns a new, unstarted :class:`Worker`.
        kwargs: Arguments of :func:`rollart_core.runtime.factories.build_engine`.
        pool: The pool that the engine is on.
        care: How the process is monitored and restarted.
    """

    def __init__(
        self,
        process: Callable[[], Worker],
        kwargs: Mapping[str, Any],
        *,
        pool: str = "local",
        care: RestartPolicy | None = None,
    ) -> None:
        self._new_process = process
        self._kwargs = kwargs
        self._care = care or RestartPolicy()
        self._worker: Worker = process()
        self._version: int | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._why: str | None = None
        self._restarted_s = 0.0  # spent on restarts
        self._closed = False
        self.pool = pool
        self.health = "down"
        self.num_restarts = 0
        self.why_lost = ""
        """The reason once the engine is lost; else empty."""

    @property
    def name(self) -> str:
        """The name used in errors and the log."""
        return self._worker.name

    async def start(self) -> None:
        """Start the process and load the model."""
        await self._bring_up(self._worker)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; if the caller is cancelled, abort the request in the engine.

        Raises:
            EngineDied: If the process has ended, before the call or during it.
        """
        worker = self._worker
        try:
            with self._asked("generate"):
                result: GenerateResult = await self._ready().call("generate", request)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the cancellation is raised in any case
                async with asyncio.timeout(ABORT_GRACE_S):
                    await worker.call("abort", [request.request_id])
            raise
        return result

    async def score(self, request: ScoreRequest) -> list[float]:
        """Return the logprobs of given tokens.

        Raises:
            EngineDied: If the process has ended, before the call or during it.
        """
        with self._asked("score"):
            logprobs: list[float] = await self._ready().call("score", request)
        return logprobs

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Load the weights of a version.

        Raises:
            EngineDied: If the process has ended; it restarts with this version or a newer one.
        """
        self._version = policy_version
        with self._asked("load_weights"):
            swap: WeightSwap = await self._ready().call("load_weights", policy_version)
        return replace(swap, engine=self._worker.name)

    async def sleep(self) -> None:
        """Release the device's memory.

        Raises:
            EngineDied: If the process has ended; it restarts when the engines have the devices.
        """
        with self._asked("sleep"):
            await self._ready().call("sleep")

    async def wake(self, policy_version: int) -> WeightSwap:
        """Continue after ``sleep`` with the weights of a version.

        Raises:
            EngineDied: If the process has ended; it restarts with this version or a newer one.
        """
        self._version = policy_version
        with self._asked("wake"):
            swap: WeightSwap = await self._ready().call("wake", policy_version)
        return replace(swap, engine=self._worker.name)

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._ready().call("pause")

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._ready().call("resume")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now."""
        await self._ready().call("abort", list(request_ids))

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        with contextlib.suppress(WorkerDied):
            await self._ready().call("release", session_id)

    async def stats(self) -> EngineStats:
        """Return counters and gauges."""
        worker = self._worker
        try:
            stats: EngineStats = await self._ready().call("stats")
        except EngineDied as e:
            self._mark_dead(worker, e)
            raise
        return stats

    def kill(self, reason: str) -> None:
        """Kill the process: its pending calls fail, and it is restarted."""
        self._why = reason
        self._worker.kill()

    async def close(self) -> None:
        """Stop the process."""
        self._closed = True
        await cancel_and_wait(self._restarting)
        await shut_down(self._worker, "close")

    # Death and restart

    @contextlib.contextmanager
    def _asked(self, boundary: str) -> Iterator[None]:
        """Raise EngineDied if the current process dies during the block or has ended before."""
        worker = self._worker
        try:
            yield
        except WorkerDied as e:
            raise EngineDied(str(e), boundary=boundary) from e
        except EngineDied as e:
            self._mark_dead(worker, e)
            raise

    def _mark_dead(self, worker: Worker, error: EngineDied) -> None:
        """Kill a process that reports that its engine (for example a server) has died."""
        if worker is self._worker and self.health == "up":
            self._why = first_line(str(error))
            self._turn("down")  # immediately, so that its requests go to other engines or wait
            worker.kill()

    def _ready(self) -> Worker:
        """Return the worker if the engine is up.

        Raises:
            WorkerDied: If its process has ended or is still starting.
        """
        if self.health != "up":
            raise WorkerDied(f"the {self._worker.name} process is {self.health}")
        return self._worker

    async def _bring_up(self, worker: Worker) -> None:
        """Start a process, load the newest weights, then set the health to ``up``.

        Raises:
            WorkerDied: If the process dies meanwhile.
        """
        await worker.start("rollart_core.runtime.factories:build_engine", self._kwargs)
        await worker.call("start")
        await self._catch_up(worker)
        worker.on_death = self._on_death
        if not worker.alive:
            raise WorkerDied(await exit_reason(worker))
        if self._care.heartbeat is not None:
            self._care.heartbeat.watch(worker)
        self._turn("up")

    async def _catch_up(self, worker: Worker) -> None:
        loaded: int | None = None
        while loaded != self._version:
            loaded = self._version
            try:
                await worker.call("load_weights", loaded)
            except LookupError:
                if loaded == self._version:
                    raise  # else: a newer version was published meanwhile

    def _on_death(self, worker: Worker) -> None:
        if not self._closed and worker is self._worker:
            self._turn("down")
            self._restarting = asyncio.ensure_future(self._come_back(worker))

    async def _come_back(self, dead: Worker) -> None:
        loop = asyncio.get_running_loop()
        why = await exit_reason(dead)
        why, self._why = f"{self._why}; {why}" if self._why else why, None
        while not self._closed:
            # Restarts may take longer than the window, and do not count towards it.
            delay_s = self._care.restarts.died(loop.time() - self._restarted_s)
            self._notify("part_died", why=why, restart_in_s=delay_s)
            await dead.close()
            if delay_s is None:
                self.why_lost = f"{dead.name} died {len(self._care.restarts.deaths)} times: {why}"
                self._notify("part_lost", why=self.why_lost)
                self._turn("lost")
                return
            died_s = loop.time()
            await asyncio.sleep(delay_s)
            dead = self._worker = self._new_process()
            self.num_restarts += 1
            began_s, limit_s = loop.time(), self._care.start_limit_s
            try:
                async with self._care.devices():
                    began_s = loop.time()
                    async with asyncio.timeout(limit_s):  # loading blocks, so a ping is no test
                        await self._bring_up(dead)
            except Exception as e:
                late = f"not up after {limit_s:g} s" if isinstance(e, TimeoutError) else ""
                why = f"its start failed: {first_line(str(e)) or late or type(e).__name__}"
                continue
            finally:
                self._restarted_s += loop.time() - began_s
            self._notify("part_back", policy_version=self._version, down_s=loop.time() - died_s)
            return

    def _turn(self, health: Health) -> None:
        self.health = health
        if self.on_health is not None:
            self.on_health(self)

    def _notify(self, kind: str, **payload: object) -> None:
        self._care.notify(kind, {"part": self._worker.name, "pool": self.pool, **payload})


async def exit_reason(dead: Worker) -> str:
    """Return the reason of a worker's end, from the error of a ping."""
    try:
        await dead.call("__ping__")
    except Exception as e:
        return first_line(str(e))
    return "gone"


class RemoteWorker:
    """An env worker in its own process."""

    def __init__(self, process: Worker) -> None:
        """Wrap a started process."""
        self._worker = process
        self.call = process.call
        """Call a method of :class:`rollart_core.rollout.env_worker.EnvWorker`."""

    @property
    def alive(self) -> bool:
        """False once the worker cannot answer any more."""
        return self._worker.alive

    async def close(self) -> None:
        """Close its environments, then stop the process."""
        await shut_down(self._worker, "shutdown")


async def shut_down(worker: Worker, method: str) -> None:
    """Shut a worker down with its own method, and kill the process if that fails."""
    if worker.alive:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await worker.call(method)
    await worker.close(grace_s=2.0)


BUILD_TRAINER = "rollart_core.runtime.factories:build_trainer"
OPEN_STORE = "rollart_core.training.process_group:open_store"
ANSWER_GRACE_S = 5.0
"""Seconds that the other ranks have to finish after one has raised. For a common error all ranks
raise at about the same time; otherwise the others wait for the failed rank without end."""


class TrainerGroup:
    """One or more trainer ranks: a call goes to all of them and returns the result of rank 0.

    Args:
        new_worker: Returns a new, unstarted worker for a rank.
        num_ranks: The number of ranks.
        kwargs: Arguments of :func:`rollart_core.runtime.factories.build_trainer`, the same for all
            ranks.
        host: The address where other ranks reach rank 0; None: the address of its machine.
        own_devices: Whether each rank's process sees only the devices assigned to it.
        watch: Called with each rank once it is built, for example to ping it.
        store: Stores batches, so that all ranks read one copy; None: in temporary files.
        devices: Entered for each call; waits until the trainer may use its devices.
    """

    def __init__(
        self,
        new_worker: Callable[[int], Worker],
        num_ranks: int,
        kwargs: Mapping[str, Any],
        *,
        host: str | None = None,
        own_devices: bool = False,
        watch: Callable[[Worker], None] = lambda worker: None,
        store: StoreRecords | None = None,
        devices: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        self._watch = watch
        self._devices = devices
        self._store = store or file_store(Path(tempfile.gettempdir()))
        self._new_part = new_worker
        self._kwargs = kwargs
        self._host = host
        self._own_devices = own_devices
        self._num_ranks = num_ranks
        self._workers: list[Worker] = []
        self._lost: str | None = None
        self._dead: Worker | None = None
        self._turn = asyncio.Lock()
        self.num_restarts = 0
        self.on_lost: Callable[[RollartError], None] | None = None
        """Called with ``TrainerLost`` when a rank dies, even if no call is in progress. Otherwise
        a run that waits for the trainer's weights would not notice the loss."""
        self._notification: asyncio.Task[None] | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self._num_ranks

    async def start(self) -> None:
        """Start the ranks, connect them, and load the model in each.

        Raises:
            TrainerLost: If a rank dies meanwhile.
            Exception: Any exception that a rank raised; the group is stopped.
        """
        self._lost, self._dead = None, None
        self._workers = [self._new_part(rank) for rank in range(self._num_ranks)]
        for worker in self._workers:
            worker.on_death = self._on_death
        if self._num_ranks == 1:
            await self._on_all(lambda rank, worker: worker.start(BUILD_TRAINER, self._kwargs))
        else:
            await self._build_ranks()
        for worker in self._workers:
            self._watch(worker)

    async def _build_ranks(self) -> None:
        await self._on_all(lambda rank, worker: worker.start())
        store = await self._on_first(OPEN_STORE, self._host)

        def build(rank: int, worker: Worker) -> Awaitable[Any]:
            ranks = RankArgs(rank, self._num_ranks, store, self._own_devices)
            return worker.call("__build__", BUILD_TRAINER, {**self._kwargs, "ranks": ranks})

        await self._on_all(build)

    async def restart(self) -> None:
        """Stop the remaining ranks and start a new group, with the initial weights of the model.

        Raises:
            TrainerLost: If a rank dies meanwhile.
        """
        self.num_restarts += 1
        async with self._devices():
            await self.close()
            await self.start()

    async def offload(self) -> int:
        """Move the trainer's tensors to host memory, which frees its devices.

        Returns:
            The bytes that rank 0 moved.

        Raises:
            TrainerLost: As :meth:`call` does.
        """
        async with self._turn:
            num_bytes: int = await self._on_all(lambda rank, worker: worker.call("offload"))
        return num_bytes

    async def reload(self) -> None:
        """Move the trainer's tensors back to its devices after ``offload``.

        Raises:
            TrainerLost: As :meth:`call` does.
        """
        async with self._turn:
            await self._on_all(lambda rank, worker: worker.call("reload"))

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        """Update the weights on a batch; ``progress`` is the used share of ``stop``."""
        reports: list[TrainStepReport]
        async with self._store(groups) as stored:
            reports = await self.call("train_batch", stored, policy_version, progress=progress)
        return reports

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step."""
        metrics: dict[str, float]
        async with self._store(samples) as stored:
            metrics = await self.call("supervise", stored, lr)
        return metrics

    async def compare(self, samples: list[Sample]) -> dict[str, float]:
        """Return how much the logprobs of samples differ from the engine's."""
        figures: dict[str, float]
        async with self._store(samples) as stored:
            figures = await self.call("compare", stored)
        return figures

    async def publish(self, policy_version: int) -> Publication:
        """Publish the weights on the channel."""
        publication: Publication = await self.call("publish", policy_version)
        return publication

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`rollart_core.training.trainer.Trainer` on all ranks.

        Returns:
            The result of rank 0.

        Raises:
            TrainerLost: If a rank has died, raised an error that the others did not raise, or
                cannot reach the others; the group is stopped.
            Exception: An error that all ranks raised; the group is unchanged.
        """
        async with self._devices(), self._turn:
            return await self._on_all(lambda rank, worker: worker.call(method, *args, **kwargs))

    async def close(self) -> None:
        """Stop all ranks; may be called twice."""
        workers, self._workers = self._workers, []
        self._lost = self._lost or "the trainer is closed"
        await asyncio.gather(*(shut_down(worker, "close") for worker in workers))

    async def _on_first(self, method: str, *args: Any) -> str:
        try:
            answer: str = await self._workers[0].call(method, *args)
        except WorkerDied as e:
            self._lose(str(e), self._workers[0])
            raise TrainerLost(str(e)) from e
        return answer

    async def _on_all(self, send: Callable[[int, Worker], Awaitable[Any]]) -> Any:
        """Call every rank and return the result of rank 0."""
        if self._lost is not None:
            raise TrainerLost(self._lost)
        workers = self._workers
        tasks = [asyncio.ensure_future(send(rank, worker)) for rank, worker in enumerate(workers)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.wait(tasks, timeout=ANSWER_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
        late = [rank for rank, task in enumerate(tasks) if not task.done()]
        await asyncio.gather(*tasks, return_exceptions=True)
        errors = {r: e for r, t in enumerate(tasks) if r not in late and (e := t.exception())}
        if not errors:
            return tasks[0].result()
        raise self._verdict(errors, workers)

    def _verdict(
        self, errors: Mapping[int, BaseException], workers: Sequence[Worker]
    ) -> BaseException:
        """Return the error to raise; stop the group unless all ranks raised the same error."""
        for rank, error in errors.items():
            if isinstance(error, WorkerDied):
                self._lose(str(error), workers[rank])
                if self._dead is workers[rank]:
                    self._lost = str(error)  # has more detail than the message of on_death
        of_memory = [e for e in errors.values() if isinstance(e, OutOfMemory)]
        error = next(iter([*of_memory, *errors.values()]))
        if self._lost is None:
            begins_again = len(workers) > 1 and any(e.can_be_split for e in of_memory)
            alike = (
                len(errors) == len(workers) and len({described(e) for e in errors.values()}) == 1
            )
            if alike and not begins_again and not _is_of_the_link(error):
                return error
            what = described(error)
            dead = workers[next(iter(errors))]
            self._lose(f"the {dead.name} process raised {what}", dead)
            if begins_again:
                self._halve_microbatches()
            elif isinstance(error, RollartError):
                return error
        lost = TrainerLost(self._lost)
        lost.__cause__ = error
        return lost

    def _halve_microbatches(self) -> None:
        """Let the next start of the ranks use smaller microbatches."""
        config = self._kwargs["config"]
        half = max(1, config.max_tokens_per_microbatch // 2)
        smaller = config.model_copy(update={"max_tokens_per_microbatch": half})
        self._kwargs = {**self._kwargs, "config": smaller}

    def _on_death(self, worker: Worker) -> None:
        if worker in self._workers and self._lost is None:
            self._lose(f"the {worker.name} process is gone", worker)
            if self.on_lost is not None:
                self._notification = asyncio.ensure_future(self._notify(worker))

    async def _notify(self, dead: Worker) -> None:
        why = await exit_reason(dead)
        if self.on_lost is not None and dead in self._workers:  # else it is being restarted
            self.on_lost(TrainerLost(why))

    def _lose(self, why: str, dead: Worker) -> None:
        """Kill the group: the remaining ranks would wait for the dead one without end."""
        if self._lost is None:
            self._lost, self._dead = why, dead
            for worker in self._workers:
                worker.kill()


def _is_of_the_link(error: BaseException) -> bool:
    """Return whether ranks could not reach each other; then none can continue.

    torch raises either its own ``Dist...Error`` or a plain RuntimeError for this.
    """
    said = str(error)
    return type(error).__name__.startswith("Dist") or "gloo/" in said or "NCCL" in said
