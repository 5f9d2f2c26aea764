"""The router: selects the engine of each request, and retries if that engine dies.

    a session's first turn:  siblings' engine, else pool by share -> engine by load   (or stolen)
    its later turns:         the same engine, until it closes (moved), or until it queues and
                             another idle engine recomputes the prompt sooner (stolen)

Takes: the engines of a run, which may join, leave and die, and the shares of a placement. Gives:
``generate``, routed by a session's KV cache, the shares and the engines' load. Never: samples or
batches. The routing policy (:class:`Routes`) does no I/O, reads no clock and calls no engine.

Deficit counters enforce the shares, one per environment and pool. Each new session adds every
pool's share to its counter and subtracts 1 from the planned pool, which is always the one with the
largest deficit (Shreedhar and Varghese 1996, doi:10.1109/90.502236, with trajectories instead of
bytes).

If an engine dies during a request, it has returned nothing. The request goes to another engine
once, with the same ``sampling_key``. It is not retried again, because a request may be the cause of
the deaths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rollart_core.contracts.hardware import Placement
from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)
from rollart_core.errors import EngineDied, EnginesLost, InferenceFailure, WorkerDied
from rollart_core.inference.shared_devices import Devices
from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done

LOOK_EVERY_S = 1.0
"""Interval between two reads of the engines' statistics, in seconds."""
LOAD_LIMIT_S = 120.0
DRAIN_S = 60.0

KV_FULL = 0.95
"""An engine with a higher KV cache usage evicts entries. It gets new sessions last."""
MIN_GAIN = 2.0
"""A session moves during an episode if it would wait this many times longer than its prompt takes
to compute."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine and its load."""

    engine: InferenceEngine
    num_running: int = 0
    """Requests sent but not yet answered."""
    num_sessions: int = 0
    num_turns: int = 0
    """Answered requests."""
    open: bool = True
    """Whether it accepts requests. False if the engine is down or leaving."""
    num_waiting: int = 0
    """Requests in the engine's own queue at the last read of its statistics."""
    kv_used: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """Rate while busy between the last two reads, a lower bound. 0 if unknown."""
    turns_per_s: float = 0.0
    num_turns_before: int = 0
    """``num_turns`` at the last read."""
    was_idle: bool = False
    last: EngineStats | None = None

    @property
    def pool(self) -> str:
        """The pool of the engine."""
        return self.engine.pool

    @property
    def idle(self) -> bool:
        """True if it got no request since the last read and has no queue."""
        quiet = not self.num_running and self.num_turns == self.num_turns_before
        return self.open and self.was_idle and quiet

    @property
    def queues(self) -> bool:
        """True if it had more requests than it can run concurrently."""
        return self.num_waiting > 0 or self.kv_used >= KV_FULL

    @property
    def load(self) -> tuple[bool, int, int]:
        """Sort key of the load. Smaller is better."""
        return self.kv_used >= KV_FULL, self.num_sessions + self.num_waiting, self.num_running

    def look(self, stats: EngineStats, since_s: float) -> None:
        """Record the engine's statistics, ``since_s`` seconds after the last read."""
        last, self.last = self.last, stats
        self.num_waiting, self.kv_used = stats.num_waiting, stats.kv_used
        self.was_idle = not (self.num_running or stats.num_running or stats.num_waiting)
        if last is not None:
            busy_s = stats.busy_s - last.busy_s
            if busy_s > 0:
                self.prefill_tokens_per_s = (stats.prefill_tokens - last.prefill_tokens) / busy_s
            if since_s > 0:
                self.turns_per_s = (self.num_turns - self.num_turns_before) / since_s
        self.num_turns_before = self.num_turns


@dataclass(slots=True, eq=False)
class _Group:
    """The sessions of one group: their engine and their planned pool."""

    state: EngineState
    pool: str | None
    num_sessions: int = 0


@dataclass(slots=True)
class RouteCounts:
    """Counters of routing events."""

    num_sessions: int = 0
    num_moved: int = 0
    """Sessions that continued on another engine because theirs closed."""
    num_stolen: int = 0
    """Sessions on another pool or engine than planned, because the planned one queued and the other
    was idle."""
    recomputed_tokens: int = 0
    """Prompt tokens in the previous cache of moved or stolen sessions."""
    by_pool: dict[str, dict[str, int]] = field(default_factory=dict)
    """Env id -> pool -> number of sessions that began there."""


class Routes:
    """The states of the engines and the engine of each session. See the module docstring."""

    def __init__(self) -> None:
        self.engine_states: list[EngineState] = []
        self.sessions: dict[str, EngineState] = {}
        self.counts = RouteCounts()
        self._shares: Mapping[str, Mapping[str, float]] = {}
        self._credits: dict[str, dict[str, float]] = {}
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}

    def plan(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """Use new shares (env id -> pool -> share). Sessions keep their engine.

        An environment without shares, or whose pools have no open engine, uses the engine with the
        least load.
        """
        self._shares = {env: dict(pools) for env, pools in shares.items()}
        self._credits.clear()

    def state(self, request: GenerateRequest) -> EngineState | None:
        """Return the engine of a request, or None if none is open. Record it for the session."""
        now = self.sessions.get(request.session_id)
        if now is None:
            return self._begin(request)
        if not now.open:
            return self._move(request, now)
        return self._steal_turn(request, now) or now

    def release(self, session_id: str) -> EngineState | None:
        """Remove a session and return its engine."""
        state = self.sessions.pop(session_id, None)
        if state is None:
            return None
        state.num_sessions -= 1
        group_id = self._group_of.pop(session_id, "")
        if group_id:
            group = self._groups[group_id]
            group.num_sessions -= 1
            if group.num_sessions == 0:
                del self._groups[group_id]
        return state

    def remove(self, state: EngineState) -> None:
        """Remove an engine. Its sessions get another one at their next request."""
        state.open = False
        self.engine_states.remove(state)

    # Start of a session

    def _begin(self, request: GenerateRequest) -> EngineState | None:
        group = self._groups.get(request.group_id) if request.group_id else None
        if group is not None and group.state.open:
            state, planned = group.state, group.pool
        else:
            planned = group.pool if group is not None else self._planned_pool(request.env_id)
            found = self._choose(planned)
            if found is None:
                return None
            state = found
            if group is not None:
                group.state = state
        self._charge(request.env_id, planned)
        self.counts.num_stolen += planned is not None and state.pool != planned
        if request.session_id:
            self._sit(request, state, planned)
        return state

    def _sit(self, request: GenerateRequest, state: EngineState, planned: str | None) -> None:
        self.sessions[request.session_id] = state
        state.num_sessions += 1
        self.counts.num_sessions += 1
        by_pool = self.counts.by_pool.setdefault(request.env_id, {})
        by_pool[state.pool] = by_pool.get(state.pool, 0) + 1
        if request.group_id:
            group = self._groups.setdefault(request.group_id, _Group(state, planned))
            group.num_sessions += 1
            self._group_of[request.session_id] = request.group_id

    def _choose(self, planned: str | None) -> EngineState | None:
        """Return the least loaded engine of a pool, or an idle engine elsewhere if the pool queues.

        If ``planned`` is None or has no open engine, any pool is allowed.
        """
        everywhere = [state for state in self.engine_states if state.open]
        there = [state for state in everywhere if state.pool == planned] or everywhere
        if not there:
            return None
        if len(there) < len(everywhere) and all(state.queues for state in there):
            idle = [state for state in everywhere if state.idle]
            there = idle or there
        return min(there, key=lambda state: state.load)

    # Shares

    def _planned_pool(self, env_id: str) -> str | None:
        shares = dict(self._open_shares(env_id))
        if not shares:
            return None
        credit = self._credits.get(env_id, {})
        return max(shares, key=lambda pool: credit.get(pool, 0.0) + shares[pool])

    def _charge(self, env_id: str, pool: str | None) -> None:
        """Add every open pool's share of one session, and subtract one from ``pool``."""
        if pool is None:
            return
        credit = self._credits.setdefault(env_id, {})
        for name, share in self._open_shares(env_id):
            credit[name] = credit.get(name, 0.0) + share
        credit[pool] = credit.get(pool, 0.0) - 1.0

    def _open_shares(self, env_id: str) -> Iterator[tuple[str, float]]:
        """Yield the pools with an open engine and their shares, which add up to 1.

        A pool without an open engine gains no deficit, so that its return does not flood it.
        """
        shares = self._shares.get(env_id)
        if not shares:
            return
        pools = {state.pool for state in self.engine_states if state.open}
        total = sum(share for pool, share in shares.items() if pool in pools)
        for pool, share in shares.items():
            if pool in pools and share > 0:
                yield pool, share / total

    # Moves of a session

    def _move(self, request: GenerateRequest, old: EngineState) -> EngineState | None:
        """Move a session whose engine closed. Its siblings follow at their next requests."""
        group = self._groups.get(self._group_of.get(request.session_id, ""))
        if group is not None and group.state.open:
            new: EngineState | None = group.state
        else:
            new = self._choose(old.pool)
            if group is not None and new is not None:
                group.state = new
        if new is not None:
            self._resit(request, old, new)
            self.counts.num_moved += 1
        return new

    def _steal_turn(self, request: GenerateRequest, now: EngineState) -> EngineState | None:
        """Return the idle engine that would finish a session's next turn sooner, if any."""
        if not now.num_waiting:
            return None
        idle = next((state for state in self.engine_states if state.idle), None)
        if idle is None or not worth_moving(len(request.token_ids), now, idle):
            return None
        self._resit(request, now, idle)
        self.counts.num_stolen += 1
        return idle

    def _resit(self, request: GenerateRequest, old: EngineState, new: EngineState) -> None:
        self.sessions[request.session_id] = new
        old.num_sessions -= 1
        new.num_sessions += 1
        self.counts.recomputed_tokens += len(request.token_ids)


def worth_moving(num_tokens: int, queueing: EngineState, idle: EngineState) -> bool:
    """Return whether an idle engine recomputes a prompt well before its turn in the queue.

    Args:
        num_tokens: Tokens of the prompt.
        queueing: The engine with its KV cache.
        idle: The idle engine.
    """
    rate = idle.prefill_tokens_per_s or queueing.prefill_tokens_per_s
    if not rate or not queueing.turns_per_s:
        return False  # the costs are not known yet
    wait_s = queueing.num_waiting / queueing.turns_per_s
    return wait_s > MIN_GAIN * num_tokens / rate


class Router:
    """Distributes sessions over engines. See the module docstring.

    Args:
        engines: The initial engines, already started.
        load_limit_s: Time limit to load new weights. An engine that exceeds it is treated as dead.
        devices: Entered for each request and each load of weights; waits until the engines may use
            their devices. If it woke them for it, it returns their swaps.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        load_limit_s: float = LOAD_LIMIT_S,
        devices: Devices = nullcontext,
    ) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._routes = Routes()
        self._load_limit_s = load_limit_s
        self._devices = devices
        self._newest: int | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self.on_lost: Callable[[EnginesLost], None] | None = None
        """Called when all engines are permanently lost."""
        for engine in engines:
            self._take_in(engine)

    @property
    def engines(self) -> list[InferenceEngine]:
        """All engines, including those that are down."""
        return [state.engine for state in self._routes.engine_states]

    @property
    def engine_states(self) -> Sequence[EngineState]:
        """The engines with their load."""
        return tuple(self._routes.engine_states)

    @property
    def counts(self) -> RouteCounts:
        """The counters of moved and stolen sessions."""
        return self._routes.counts

    def place(self, placement: Placement) -> None:
        """Use a placement from now on. Running sessions keep their engine."""
        self._routes.plan(placement.engines)

    # Requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the engine of the session, or on a newly selected engine.

        Raises:
            InferenceFailure: If the request cannot be answered, or two engines died during it.
        """
        async with self._devices():
            return await self._generate(request)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        state = self._routes.sessions.get(request.session_id)
        if state is None or not state.open or state.num_waiting:
            state = await self._state(request)
        try:
            return await self._generate_on(state, request)
        except EngineDied:
            return await self._generate_on(await self._state(request), request)

    async def release(self, session_id: str) -> None:
        """Release a session on its engine."""
        state = self._routes.release(session_id)
        if state is not None:
            await state.engine.release(session_id)

    async def _generate_on(self, state: EngineState, request: GenerateRequest) -> GenerateResult:
        state.num_running += 1
        try:
            return await state.engine.generate(request)
        except EngineDied:
            state.open = state.engine.health == "up"
            raise
        finally:
            state.num_running -= 1
            state.num_turns += 1
            if not state.open:
                self._changed.set()  # a caller may wait until it has no requests

    async def _state(self, request: GenerateRequest) -> EngineState:
        """Wait until an engine is open and reserve it."""
        before = self._routes.sessions.get(request.session_id)
        while (state := self._routes.state(request)) is None:
            if self._lost:
                raise InferenceFailure(self._exit_reason(), boundary="generate")
            await self._next_change()
        if before is not None and state is not before and before.engine.health == "up":
            self._spawn(before.engine.release(request.session_id))
        return state

    # Weights

    async def load_weights(self, policy_version: int) -> list[WeightSwap]:
        """Swap every engine to a version. Return when all engines that are up have it.

        Do not wait for an engine that dies meanwhile or exceeds ``load_limit_s``. After its restart
        it loads the newest version before it gets requests.

        Raises:
            EnginesLost: If every engine is permanently lost.
        """
        self._newest = policy_version
        self.check()
        async with self._devices() as swaps:
            if swaps is not None:
                return swaps
            return await self._on_all(
                lambda engine: engine.load_weights(policy_version), "load weights"
            )

    async def sleep(self) -> None:
        """Release the devices' memory on all engines that are up."""
        await self._on_all(lambda engine: engine.sleep(), "release its memory")

    async def wake(self) -> list[WeightSwap]:
        """Wake all engines that are up, with the newest weights."""
        version = self._newest
        assert version is not None, "engines wake with the weights of a version"
        return await self._on_all(lambda engine: engine.wake(version), "wake")

    async def _on_all(
        self, ask: Callable[[InferenceEngine], Coroutine[Any, Any, T]], what: str
    ) -> list[T]:
        """Ask every engine; an engine that dies or is late is left out."""

        async def one(engine: InferenceEngine) -> T | None:
            try:
                async with asyncio.timeout(self._load_limit_s):
                    return await ask(engine)
            except EngineDied:
                return None
            except TimeoutError:
                engine.kill(f"it did not {what} within {self._load_limit_s:g} s")
                return None

        states = tuple(self._routes.engine_states)
        found = await asyncio.gather(*(one(state.engine) for state in states))
        return [answer for answer in found if answer is not None]

    def check(self) -> None:
        """Raise EnginesLost if every engine is permanently lost."""
        if self._lost:
            raise EnginesLost(self._exit_reason())

    # Engines join and leave

    async def add(self, engine: InferenceEngine) -> None:
        """Add a started engine. It loads the newest weights before it gets requests.

        Raises:
            EngineDied: If it dies while loading.
        """
        loaded = None
        while loaded != self._newest:
            loaded = self._newest
            assert loaded is not None
            try:
                await engine.load_weights(loaded)
            except LookupError:
                if loaded == self._newest:
                    raise  # else: a newer version was published meanwhile
        self._take_in(engine)
        self._changed.set()

    async def remove(self, engine: InferenceEngine, *, drain_s: float = DRAIN_S) -> bool:
        """Send no more requests to an engine and wait until it has answered the current ones.

        At their next turn, its sessions continue on another engine, which recomputes their KV
        cache. The caller closes the engine.

        Returns:
            False if some requests were not answered within ``drain_s``. Closing the engine fails
            them.

        Raises:
            ValueError: If it is the last engine.
        """
        state = next(state for state in self._routes.engine_states if state.engine is engine)
        if len(self._routes.engine_states) == 1:
            raise ValueError("the last engine cannot be removed")
        engine.on_health = None
        self._routes.remove(state)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while state.num_running:
                    await self._next_change()
        return not state.num_running

    async def stats(self) -> list[EngineStats]:
        """Return the counters of every engine that is up."""
        up = [state.engine for state in self._routes.engine_states if state.engine.health == "up"]
        found = await asyncio.gather(*(_or_none(engine.stats()) for engine in up))
        return [stats for stats in found if stats is not None]

    def watch(self) -> None:
        """Read the engines' statistics at intervals, until ``close``."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="router looks at engines")

    async def close(self) -> None:
        """Stop the background tasks. The caller closes the engines."""
        looking, self._looking = self._looking, None
        await cancel_and_wait(*self._tasks, looking)

    def _take_in(self, engine: InferenceEngine) -> None:
        self._routes.engine_states.append(EngineState(engine, open=engine.health == "up"))
        engine.on_health = self._on_health

    def _on_health(self, engine: InferenceEngine) -> None:
        for state in self._routes.engine_states:
            if state.engine is engine:
                state.open = engine.health == "up"
        self._changed.set()
        if self._lost and self.on_lost is not None:
            self.on_lost(EnginesLost(self._exit_reason()))

    @property
    def _lost(self) -> bool:
        return all(state.engine.health == "lost" for state in self._routes.engine_states)

    def _exit_reason(self) -> str:
        whys = {getattr(engine, "why_lost", "") or "gone" for engine in self.engines}
        return f"no inference engine is left and none will restart: {'; '.join(sorted(whys))}"

    async def _next_change(self) -> None:
        """Wait until an engine opens, closes or has answered its last request."""
        self._changed.clear()
        await self._changed.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = loop.time()
            up = [state for state in self._routes.engine_states if state.engine.health == "up"]
            await asyncio.gather(*(_look_at(state, now_s - before_s) for state in up))
            before_s = now_s

    def _spawn(self, work: Awaitable[None]) -> None:
        keep_until_done(asyncio.ensure_future(work), self._tasks)


def combined(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the combined counters of several engines: sums, and means of shares."""
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


async def _look_at(state: EngineState, since_s: float) -> None:
    stats = await _or_none(state.engine.stats())
    if stats is not None:
        state.look(stats, since_s)


async def _or_none(work: Awaitable[T]) -> T | None:
    """Return the result of an engine, or None if it does not answer soon. It may be dead."""
    try:
        async with asyncio.timeout(LOOK_EVERY_S):
            return await work
    except (TimeoutError, WorkerDied, InferenceFailure):
        return None
