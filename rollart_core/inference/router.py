"""Many engines as one: requests go where :mod:`rollart_core.inference.load_balancer` says.

Takes: the engines of a run, which may join, leave and die. Gives: ``generate``, that a session's
KV cache, the placement's shares and the engines' load decide about. Never: samples or batches.

An engine that dies while it works on a request has given nothing back yet: the request goes to
another engine once, with the same ``sampling_key``. More often it does not, since a request may be
what kills engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TypeVar

from rollart_core.contracts.hardware import Placement
from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)
from rollart_core.errors import EngineDied, EnginesLost, InferenceFailure, WorkerDied
from rollart_core.inference.load_balancer import EngineState, RouteCounts, Routes

LOOK_EVERY_S = 1.0
"""How often engines are asked what they have to do."""
LOAD_LIMIT_S = 120.0
DRAIN_S = 60.0

T = TypeVar("T")


class Router:
    """Spreads sessions over engines; see the module.

    Args:
        engines: The first ones, started.
        load_limit_s: An engine that has not loaded new weights after this long is treated as dead.
    """

    def __init__(
        self, engines: Sequence[InferenceEngine], *, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._routes = Routes()
        self._load_limit_s = load_limit_s
        self._newest: int | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self.on_lost: Callable[[EnginesLost], None] | None = None
        """Called when every engine is gone and none comes back."""
        for engine in engines:
            self._seat_of(engine)

    @property
    def engines(self) -> list[InferenceEngine]:
        """Those there are, also while they are down."""
        return [seat.engine for seat in self._routes.seats]

    @property
    def seats(self) -> Sequence[EngineState]:
        """The engines with what they have to do."""
        return tuple(self._routes.seats)

    @property
    def counts(self) -> RouteCounts:
        """What was moved and stolen so far."""
        return self._routes.counts

    def place(self, placement: Placement) -> None:
        """Follow a placement from now on; sessions that have begun stay where they are."""
        self._routes.plan(placement.engines)

    # Requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the engine that holds the session, or on the one that is its turn.

        Raises:
            InferenceFailure: When it cannot be answered, or two engines died over it.
        """
        seat = self._routes.sessions.get(request.session_id)
        if seat is None or not seat.open or seat.num_waiting:
            seat = await self._seat(request)
        seat.num_running += 1
        try:
            return await seat.engine.generate(request)
        except EngineDied:
            seat.open = seat.engine.health == "up"
        finally:
            seat.num_running -= 1
            seat.num_turns += 1
            if not seat.open:
                self._changed.set()  # somebody may wait for it to be empty
        return await self._generate_again(request)

    async def release(self, session_id: str) -> None:
        """Forget a session everywhere."""
        seat = self._routes.release(session_id)
        if seat is not None:
            await seat.engine.release(session_id)

    async def _generate_again(self, request: GenerateRequest) -> GenerateResult:
        seat = await self._seat(request)
        seat.num_running += 1
        try:
            return await seat.engine.generate(request)
        except EngineDied:
            seat.open = seat.engine.health == "up"
            raise
        finally:
            seat.num_running -= 1
            seat.num_turns += 1
            self._changed.set()

    async def _seat(self, request: GenerateRequest) -> EngineState:
        """Wait until an engine is open and take it."""
        before = self._routes.sessions.get(request.session_id)
        while (seat := self._routes.seat(request)) is None:
            if self._lost:
                raise InferenceFailure(self._exit_reason(), boundary="generate")
            await self._next_change()
        if before is not None and seat is not before and before.engine.health == "up":
            self._spawn(before.engine.release(request.session_id))
        return seat

    # Weights

    async def load_weights(self, policy_version: int) -> list[WeightSwap]:
        """Swap every engine to a version; returns when all that are up hold it.

        One that dies meanwhile, or takes longer than ``load_limit_s``, is not waited for: it loads
        the newest version when it is back, before it gets any request.

        Raises:
            EnginesLost: When every engine is gone for good.
        """
        self._newest = policy_version
        self.check()
        swaps = (self._swap(seat.engine, policy_version) for seat in tuple(self._routes.seats))
        return [swap for swap in await asyncio.gather(*swaps) if swap is not None]

    async def _swap(self, engine: InferenceEngine, policy_version: int) -> WeightSwap | None:
        try:
            async with asyncio.timeout(self._load_limit_s):
                return await engine.load_weights(policy_version)
        except EngineDied:
            return None
        except TimeoutError:
            engine.kill(f"it did not load weights within {self._load_limit_s:g} s")
            return None

    def check(self) -> None:
        """Raise EnginesLost when every engine is gone for good."""
        if self._lost:
            raise EnginesLost(self._exit_reason())

    # Engines come and go

    async def add(self, engine: InferenceEngine) -> None:
        """Take in a started engine: it loads the newest weights, and only then gets requests.

        Raises:
            EngineDied: When it dies over that.
        """
        loaded = None
        while loaded != self._newest:
            loaded = self._newest
            assert loaded is not None
            try:
                await engine.load_weights(loaded)
            except LookupError:
                if loaded == self._newest:
                    raise  # else: overtaken meanwhile
        self._seat_of(engine)
        self._changed.set()

    async def remove(self, engine: InferenceEngine, *, drain_s: float = DRAIN_S) -> bool:
        """Send an engine no more requests and wait until it has answered those it has.

        Its sessions go on elsewhere with their next turn, where their KV is computed again. The
        caller closes the engine.

        Returns:
            False when some requests were not answered within ``drain_s``; closing it fails them.

        Raises:
            ValueError: When it is the last one.
        """
        seat = next(seat for seat in self._routes.seats if seat.engine is engine)
        if len(self._routes.seats) == 1:
            raise ValueError("the last engine cannot be removed")
        engine.on_health = None
        self._routes.remove(seat)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while seat.num_running:
                    await self._next_change()
        return not seat.num_running

    async def stats(self) -> list[EngineStats]:
        """Return the counters of every engine that is up."""
        up = [seat.engine for seat in self._routes.seats if seat.engine.health == "up"]
        found = await asyncio.gather(*(_or_none(engine.stats()) for engine in up))
        return [stats for stats in found if stats is not None]

    def watch(self) -> None:
        """Ask engines what they have to do, at intervals, until ``close``."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="router looks at engines")

    async def close(self) -> None:
        """End what goes on in the background; the engines are the caller's."""
        tasks = [*self._tasks, *([self._looking] if self._looking else [])]
        self._looking = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _seat_of(self, engine: InferenceEngine) -> None:
        self._routes.seats.append(EngineState(engine, open=engine.health == "up"))
        engine.on_health = self._on_health

    def _on_health(self, engine: InferenceEngine) -> None:
        for seat in self._routes.seats:
            if seat.engine is engine:
                seat.open = engine.health == "up"
        self._changed.set()
        if self._lost and self.on_lost is not None:
            self.on_lost(EnginesLost(self._exit_reason()))

    @property
    def _lost(self) -> bool:
        return all(seat.engine.health == "lost" for seat in self._routes.seats)

    def _exit_reason(self) -> str:
        whys = {getattr(engine, "why_lost", "") or "gone" for engine in self.engines}
        return f"no inference engine is left and none comes back: {'; '.join(sorted(whys))}"

    async def _next_change(self) -> None:
        """Wait until an engine opens, closes or has answered its last."""
        self._changed.clear()
        await self._changed.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = loop.time()
            up = [seat for seat in self._routes.seats if seat.engine.health == "up"]
            await asyncio.gather(*(_look_at(seat, now_s - before_s) for seat in up))
            before_s = now_s

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def combined(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the counters of several engines as those of one: sums, and means of shares."""
    if len(stats) == 1:
        return stats[0]
    sums = {
        f.name: sum(getattr(s, f.name) for s in stats)
        for f in fields(EngineStats)
        if f.name not in ("policy_version", "kv_used", "extra")
    }
    extra: dict[str, float] = {}
    for each in stats:
        for name, value in each.extra.items():
            extra[name] = extra.get(name, 0.0) + value
    kv_used = sum(s.kv_used for s in stats) / len(stats) if stats else 0.0
    version = min((s.policy_version for s in stats), default=0)
    return EngineStats(policy_version=version, kv_used=kv_used, extra=extra, **sums)


async def _look_at(seat: EngineState, since_s: float) -> None:
    stats = await _or_none(seat.engine.stats())
    if stats is not None:
        seat.look(stats, since_s)


async def _or_none(work: Awaitable[T]) -> T | None:
    """Return what an engine answers soon, or None: it may be about to be found dead."""
    try:
        async with asyncio.timeout(LOOK_EVERY_S):
            return await work
    except (TimeoutError, WorkerDied, InferenceFailure):
        return None
