"""Parts of a run that execute in processes of their own, in the shape of local ones.

Takes: what to build. Gives: an engine, env workers. Never: hides that a process died: a
call on a dead engine is an InferenceFailure, and the engine comes back with the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)
from rollart_core.errors import InferenceFailure, PartDied
from rollart_core.runtime.part import Part

MAX_RESTARTS = 3
SHUTDOWN_GRACE_S = 10.0


class RemoteEngine(InferenceEngine):
    """An inference engine in a process that is started again when it dies."""

    def __init__(self, process: Callable[[], Part], kwargs: Mapping[str, Any]) -> None:
        """Describe it.

        Args:
            process: Returns a fresh, unstarted :class:`Part`.
            kwargs: Arguments of :func:`rollart_core.runtime.parts.build_engine`.
        """
        self._new_process = process
        self._kwargs = kwargs
        self._part: Part = process()
        self._version: int | None = None
        self._back = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self.num_restarts = 0
        self._closed = False

    async def start(self) -> None:
        """Start the process and load the model."""
        await self._part.start("rollart_core.runtime.parts:build_engine", self._kwargs)
        await self._part.call("start")
        self._part.on_death = self._on_death
        self._back.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; aborts in the engine when the caller is cancelled."""
        await self._back.wait()
        part = self._part
        try:
            result: GenerateResult = await part.call("generate", request)
        except PartDied as e:
            raise InferenceFailure(str(e), boundary="generate") from e
        except asyncio.CancelledError:
            with contextlib.suppress(PartDied):
                await asyncio.shield(part.call("abort", [request.request_id]))
            raise
        return result

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Swap to a version; an engine that dies meanwhile comes back with it."""
        self._version = policy_version
        await self._back.wait()
        try:
            swap: WeightSwap = await self._part.call("load_weights", policy_version)
        except PartDied:
            await self._back.wait()
            swap = await self._part.call("load_weights", policy_version)
        return swap

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._part.call("pause")

    async def resume(self) -> None:
        """Go on."""
        await self._part.call("resume")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now."""
        await self._part.call("abort", list(request_ids))

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        with contextlib.suppress(PartDied):
            await self._part.call("release", session_id)

    async def stats(self) -> EngineStats:
        """Return counters and gauges."""
        stats: EngineStats = await self._part.call("stats")
        return stats

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await shut_down(self._part, "close")

    def _on_death(self, part: Part) -> None:
        self._back.clear()
        if not self._closed and self.num_restarts < MAX_RESTARTS:
            self._restarting = asyncio.ensure_future(self._restart(part))
        else:
            self._back.set()  # calls fail at once and say why

    async def _restart(self, dead: Part) -> None:
        self.num_restarts += 1
        try:
            await dead.close()
            self._part = self._new_process()
            await self.start()
            if self._version is not None:
                await self._part.call("load_weights", self._version)
        finally:
            self._back.set()


class RemoteWorker:
    """An env worker in a process of its own."""

    def __init__(self, process: Part) -> None:
        """Wrap a started process."""
        self._part = process

    @property
    def alive(self) -> bool:
        """False when it will never answer again."""
        return self._part.alive

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the worker."""
        return await self._part.call(method, *args, **kwargs)

    async def close(self) -> None:
        """Close its environments, then end the process."""
        await shut_down(self._part, "shutdown")


async def shut_down(part: Part, method: str) -> None:
    """Let a part end in order if it can, and by force if not."""
    if part.alive:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await part.call(method)
    await part.close(grace_s=2.0)
