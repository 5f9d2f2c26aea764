"""Parts of a run that execute in processes of their own, in the shape of local ones.

Takes: what to build. Gives: engines, env workers. Never: hides that a process died: a request that
was on a dead engine raises EngineDied, and the engine comes back with the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rollart_core.errors import EngineDied, WorkerDied, first_line
from rollart_core.runtime.heartbeat import Heartbeat, Tell, nobody_listens
from rollart_core.runtime.restart_policy import Restarts
from rollart_core.runtime.worker import Worker

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
    """How a part is looked after."""

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
        self._part: Worker = process()
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
        return self._part.name

    async def start(self) -> None:
        """Start the process and load the model."""
        await self._bring_up(self._part)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; aborts in the engine when the caller is cancelled.

        Raises:
            EngineDied: When its process is gone, before or meanwhile.
        """
        part = self._part
        try:
            with self._asked("generate"):
                result: GenerateResult = await self._ready().call("generate", request)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # it stays a cancellation, whatever becomes of it
                async with asyncio.timeout(ABORT_GRACE_S):
                    await part.call("abort", [request.request_id])
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
        return replace(swap, engine=self._part.name)

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
        part = self._part
        try:
            stats: EngineStats = await self._ready().call("stats")
        except EngineDied as e:
            self._mark_dead(part, e)
            raise
        return stats

    def kill(self, reason: str) -> None:
        """Treat it as dead: what it was asked fails, and it is started again."""
        self._why = reason
        self._part.kill()

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await shut_down(self._part, "close")

    # Death and return

    @contextlib.contextmanager
    def _asked(self, boundary: str) -> Iterator[None]:
        """Raise EngineDied for what is asked of the present process and finds it gone."""
        part = self._part
        try:
            yield
        except WorkerDied as e:
            raise EngineDied(str(e), boundary=boundary) from e
        except EngineDied as e:
            self._mark_dead(part, e)
            raise

    def _mark_dead(self, part: Worker, error: EngineDied) -> None:
        """End a process that says itself that what answers in it (a server, say) is gone."""
        if part is self._part and self.health == "up":
            self._why = first_line(str(error))
            self._turn("down")  # at once: what it was asked is asked elsewhere, or waits
            part.kill()

    def _ready(self) -> Worker:
        """Return the part, with the engine in it.

        Raises:
            WorkerDied: When it is gone, or is only being started.
        """
        if self.health != "up":
            raise WorkerDied(f"the {self._part.name} process is {self.health}")
        return self._part

    async def _bring_up(self, part: Worker) -> None:
        """Start a process, give it the newest weights, and only then be up.

        Raises:
            WorkerDied: When it died over that.
        """
        await part.start("rollart_core.runtime.factories:build_engine", self._kwargs)
        await part.call("start")
        await self._catch_up(part)
        part.on_death = self._on_death
        if not part.alive:
            raise WorkerDied(await exit_reason(part))
        if self._care.heartbeat is not None:
            self._care.heartbeat.watch(part)
        self._turn("up")

    async def _catch_up(self, part: Worker) -> None:
        loaded: int | None = None
        while loaded != self._version:
            loaded = self._version
            try:
                await part.call("load_weights", loaded)
            except LookupError:
                if loaded == self._version:
                    raise  # else: overtaken meanwhile

    def _on_death(self, part: Worker) -> None:
        if not self._closed and part is self._part:
            self._turn("down")
            self._restarting = asyncio.ensure_future(self._come_back(part))

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
            dead = self._part = self._new_process()
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
        self._care.tell(kind, {"part": self._part.name, "pool": self.pool, **payload})


async def exit_reason(dead: Worker) -> str:
    """Return how a part says that it is gone."""
    try:
        await dead.call("__ping__")
    except Exception as e:
        return first_line(str(e))
    return "gone"


class RemoteWorker:
    """An env worker in a process of its own."""

    def __init__(self, process: Worker) -> None:
        """Wrap a started process."""
        self._part = process
        self.call = process.call
        """Calls a method of :class:`rollart_core.rollout.env_worker.EnvWorker`."""

    @property
    def alive(self) -> bool:
        """False when it will never answer again."""
        return self._part.alive

    async def close(self) -> None:
        """Close its environments, then end the process."""
        await shut_down(self._part, "shutdown")


async def shut_down(part: Worker, method: str) -> None:
    """Let a part end in order if it can, and by force if not."""
    if part.alive:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await part.call(method)
    await part.close(grace_s=2.0)
