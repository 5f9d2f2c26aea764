"""Engines, env workers and the trainer in processes of their own, in the shape of local ones.

    RemoteEngine    one process; it dies -> EngineDied, and it comes back with the newest weights
    RemoteWorker    one process; it dies -> WorkerDied, and the pool of env workers starts another
    TrainerGroup    a process a rank; one dies -> TrainerLost, and ``restart`` brings up all again

Takes: unstarted workers, and what to build in them. Gives: their methods. Never: hides that a
process died, or leaves ranks waiting in a collective call for one that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    RollartError,
    TrainerLost,
    WorkerDied,
    described,
    first_line,
)
from rollart_core.runtime.factories import RankArgs
from rollart_core.runtime.heartbeat import Heartbeat, Tell, nobody_listens
from rollart_core.runtime.worker import Worker
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Sample

FIRST_DELAY_S = 0.5
"""Before the second restart of a window; the first one is at once."""
LONGEST_DELAY_S = 30.0


@dataclass(slots=True)
class Restarts:
    """The deaths of one worker.

    Args:
        most: Restarts within a window; one more death and the worker is given up.
        window_s: Seconds after which a death no longer counts.
    """

    most: int
    window_s: float
    deaths: list[float] = field(default_factory=list)
    """Seconds, of those that count."""

    def died(self, now_s: float) -> float | None:
        """Take note of a death; returns seconds to wait before the restart, None for no restart."""
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
"""A restart that takes longer counts as a death."""


def _default_restarts() -> Restarts:
    return Restarts(MAX_RESTARTS, RESTART_WINDOW_S)


@dataclass(slots=True)
class RestartPolicy:
    """How a worker is looked after."""

    heartbeat: Heartbeat | None = None
    restarts: Restarts = field(default_factory=_default_restarts)
    tell: Tell = nobody_listens


class RemoteEngine(InferenceEngine):
    """An inference engine in a process that is started again when it dies.

    Args:
        process: Returns a fresh, unstarted :class:`Worker`.
        kwargs: Arguments of :func:`rollart_core.runtime.factories.build_engine`.
        pool: Where it is.
        care: How it is looked after.
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
        self._closed = False
        self.pool = pool
        self.health = "down"
        self.num_restarts = 0
        self.why_lost = ""
        """Once it is lost: why."""

    @property
    def name(self) -> str:
        """What errors and the log call it."""
        return self._worker.name

    async def start(self) -> None:
        """Start the process and load the model."""
        await self._bring_up(self._worker)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; aborts in the engine when the caller is cancelled.

        Raises:
            EngineDied: When its process is gone, before or meanwhile.
        """
        worker = self._worker
        try:
            with self._asked("generate"):
                result: GenerateResult = await self._ready().call("generate", request)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # it stays a cancellation, whatever becomes of it
                async with asyncio.timeout(ABORT_GRACE_S):
                    await worker.call("abort", [request.request_id])
            raise
        return result

    async def score(self, request: ScoreRequest) -> list[float]:
        """Return the logprobs of given tokens.

        Raises:
            EngineDied: When its process is gone, before or meanwhile.
        """
        with self._asked("score"):
            logprobs: list[float] = await self._ready().call("score", request)
        return logprobs

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Swap to a version.

        Raises:
            EngineDied: When its process is gone; it comes back with that version, or a newer one.
        """
        self._version = policy_version
        with self._asked("load_weights"):
            swap: WeightSwap = await self._ready().call("load_weights", policy_version)
        return replace(swap, engine=self._worker.name)

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._ready().call("pause")

    async def resume(self) -> None:
        """Go on."""
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
        """Treat it as dead: what it was asked fails, and it is started again."""
        self._why = reason
        self._worker.kill()

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await shut_down(self._worker, "close")

    # Death and return

    @contextlib.contextmanager
    def _asked(self, boundary: str) -> Iterator[None]:
        """Raise EngineDied for what is asked of the present process and finds it gone."""
        worker = self._worker
        try:
            yield
        except WorkerDied as e:
            raise EngineDied(str(e), boundary=boundary) from e
        except EngineDied as e:
            self._mark_dead(worker, e)
            raise

    def _mark_dead(self, worker: Worker, error: EngineDied) -> None:
        """End a process that says itself that what answers in it (a server, say) is gone."""
        if worker is self._worker and self.health == "up":
            self._why = first_line(str(error))
            self._turn("down")  # at once: what it was asked is asked elsewhere, or waits
            worker.kill()

    def _ready(self) -> Worker:
        """Return the worker, with the engine in it.

        Raises:
            WorkerDied: When it is gone, or is only being started.
        """
        if self.health != "up":
            raise WorkerDied(f"the {self._worker.name} process is {self.health}")
        return self._worker

    async def _bring_up(self, worker: Worker) -> None:
        """Start a process, give it the newest weights, and only then be up.

        Raises:
            WorkerDied: When it died over that.
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
                    raise  # else: overtaken meanwhile

    def _on_death(self, worker: Worker) -> None:
        if not self._closed and worker is self._worker:
            self._turn("down")
            self._restarting = asyncio.ensure_future(self._come_back(worker))

    async def _come_back(self, dead: Worker) -> None:
        loop = asyncio.get_running_loop()
        why = await exit_reason(dead)
        why, self._why = f"{self._why}; {why}" if self._why else why, None
        while not self._closed:
            delay_s = self._care.restarts.died(loop.time())
            self._tell("part_died", why=why, restart_in_s=delay_s)
            await dead.close()
            if delay_s is None:
                self.why_lost = f"{dead.name} died {len(self._care.restarts.deaths)} times: {why}"
                self._tell("part_lost", why=self.why_lost)
                self._turn("lost")
                return
            died_s = loop.time()
            await asyncio.sleep(delay_s)
            dead = self._worker = self._new_process()
            self.num_restarts += 1
            try:
                async with asyncio.timeout(START_LIMIT_S):  # no ping can tell: loading is slow too
                    await self._bring_up(dead)
            except Exception as e:
                why = f"its start failed: {first_line(str(e)) or type(e).__name__}"
                continue
            self._tell("part_back", policy_version=self._version, down_s=loop.time() - died_s)
            return

    def _turn(self, health: Health) -> None:
        self.health = health
        if self.on_health is not None:
            self.on_health(self)

    def _tell(self, kind: str, **payload: object) -> None:
        self._care.tell(kind, {"part": self._worker.name, "pool": self.pool, **payload})


async def exit_reason(dead: Worker) -> str:
    """Return how a worker says that it is gone."""
    try:
        await dead.call("__ping__")
    except Exception as e:
        return first_line(str(e))
    return "gone"


class RemoteWorker:
    """An env worker in a process of its own."""

    def __init__(self, process: Worker) -> None:
        """Wrap a started process."""
        self._worker = process
        self.call = process.call
        """Calls a method of :class:`rollart_core.rollout.env_worker.EnvWorker`."""

    @property
    def alive(self) -> bool:
        """False when it will never answer again."""
        return self._worker.alive

    async def close(self) -> None:
        """Close its environments, then end the process."""
        await shut_down(self._worker, "shutdown")


async def shut_down(worker: Worker, method: str) -> None:
    """Let a worker end in order if it can, and by force if not."""
    if worker.alive:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await worker.call(method)
    await worker.close(grace_s=2.0)


BUILD_TRAINER = "rollart_core.runtime.factories:build_trainer"
OPEN_STORE = "rollart_core.training.process_group:open_store"
ANSWER_GRACE_S = 5.0
"""How long the other ranks may go on when one has raised: on a common mistake all raise at once,
otherwise they wait for it in vain."""


class TrainerGroup:
    """One or more trainer ranks: a call goes to all, and rank 0's answer comes back.

    Args:
        new_worker: From a rank to a fresh, unstarted worker.
        num_ranks: How many.
        kwargs: Arguments of :func:`rollart_core.runtime.factories.build_trainer`, for all ranks
        alike. host: Where the other ranks reach rank 0; None: the address of the machine it is on.
        own_devices: Whether each rank's process sees the devices that it has, and no others.
        watch: Gets each rank once it is built; pings, for one.
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
    ) -> None:
        self._watch = watch
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
        """Called with ``TrainerLost`` when a rank dies, whether or not it was asked for anything:
        what the engines wait for (its weights) may be what the next batch waits for."""
        self._telling: asyncio.Task[None] | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return self._num_ranks

    async def start(self) -> None:
        """Start the ranks, let them find each other, and load the model in each.

        Raises:
            TrainerLost: When a rank died meanwhile.
            Exception: Whatever a rank raised; the group is ended then.
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
        """End what is left and start a fresh group, with the weights the model began with.

        Raises:
            TrainerLost: When a rank died meanwhile.
        """
        self.num_restarts += 1
        await self.close()
        await self.start()

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        """Update the weights on a batch, at a share of ``stop`` for the schedule."""
        reports: list[TrainStepReport] = await self.call(
            "train_batch", groups, policy_version, progress=progress
        )
        return reports

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step."""
        metrics: dict[str, float] = await self.call("supervise", samples, lr)
        return metrics

    async def publish(self, policy_version: int) -> Publication:
        """Put the weights on the channel."""
        publication: Publication = await self.call("publish", policy_version)
        return publication

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`rollart_core.training.trainer.Trainer` on all ranks.

        Returns:
            What rank 0 answered.

        Raises:
            TrainerLost: When a rank is gone, raised what the others did not, or cannot reach the
                others; the group is ended.
            Exception: What all ranks raised alike; the group is as it was.
        """
        async with self._turn:
            return await self._on_all(lambda rank, worker: worker.call(method, *args, **kwargs))

    async def close(self) -> None:
        """End all ranks; may be called twice."""
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
        """Send something to every rank and return rank 0's answer."""
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
        """Return what to raise; ends the group unless all ranks raised the same."""
        for rank, error in errors.items():
            if isinstance(error, WorkerDied):
                self._lose(str(error), workers[rank])
                if self._dead is workers[rank]:
                    self._lost = str(error)  # says more than hearing of the death did
        error = next(iter(errors.values()))
        if self._lost is None:
            alike = (
                len(errors) == len(workers) and len({described(e) for e in errors.values()}) == 1
            )
            if alike and not _is_of_the_link(error):
                return error
            what = described(error)
            dead = workers[next(iter(errors))]
            self._lose(f"the {dead.name} process raised {what}", dead)
            if isinstance(error, RollartError):
                return error
        lost = TrainerLost(self._lost)
        lost.__cause__ = error
        return lost

    def _on_death(self, worker: Worker) -> None:
        if worker in self._workers and self._lost is None:
            self._lose(f"the {worker.name} process is gone", worker)
            if self.on_lost is not None:
                self._telling = asyncio.ensure_future(self._tell(worker))

    async def _tell(self, dead: Worker) -> None:
        why = await exit_reason(dead)
        if self.on_lost is not None and dead in self._workers:  # else it is being started again
            self.on_lost(TrainerLost(why))

    def _lose(self, why: str, dead: Worker) -> None:
        """End the group: who is left would wait for ever for who is gone."""
        if self._lost is None:
            self._lost, self._dead = why, dead
            for worker in self._workers:
                worker.kill()


def _is_of_the_link(error: BaseException) -> bool:
    """Say whether ranks could not reach each other: all may notice alike, and none can go on.

    torch raises plain RuntimeErrors for it besides its own ``Dist...Error``.
    """
    said = str(error)
    return type(error).__name__.startswith("Dist") or "gloo/" in said or "NCCL" in said
