"""Which engine answers which trajectory: the policy behind the router.

    a session's first turn:  siblings' engine, else pool by share -> engine by load   (or stolen)
    its later turns:         the same engine, until that closes (moved) or queues while another
                             idles and computing its prompt again is the shorter wait (stolen)

Takes: requests, the shares of a placement, what engines say of themselves. Gives: a seat for each
request. Never: does I/O, reads a clock or calls an engine.

Shares are kept by deficit counters, one per environment and pool: each new session adds a pool's
share to its counter and takes 1 from the pool it is planned for, which is always the one furthest
behind (Shreedhar and Varghese 1996, doi:10.1109/90.502236, with trajectories for bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollart_core.contracts.inference import EngineStats, GenerateRequest, InferenceEngine

KV_FULL = 0.95
"""An engine whose KV cache is fuller than this evicts: it gets new sessions last."""
MIN_GAIN = 2.0
"""A session moves in mid-episode when it would wait this many times what its prompt takes."""


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine and how much it has to do."""

    engine: InferenceEngine
    num_running: int = 0
    """Requests sent and not answered."""
    num_sessions: int = 0
    num_turns: int = 0
    """Requests answered."""
    open: bool = True
    """Whether it takes requests; an engine that is down or leaves does not."""
    num_waiting: int = 0
    """Requests in the engine's own queue, when it was last looked at."""
    kv_used: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """While busy, between the last two looks; a lower bound. 0: not known."""
    turns_per_s: float = 0.0
    num_turns_before: int = 0
    """When it was last looked at."""
    was_idle: bool = False
    last: EngineStats | None = None

    @property
    def pool(self) -> str:
        """Where the engine is."""
        return self.engine.pool

    @property
    def idle(self) -> bool:
        """True when nothing was asked of it since it was last looked at, and nothing is queued."""
        quiet = not self.num_running and self.num_turns == self.num_turns_before
        return self.open and self.was_idle and quiet

    @property
    def queues(self) -> bool:
        """True when it had more to do than it can do at once."""
        return self.num_waiting > 0 or self.kv_used >= KV_FULL

    @property
    def load(self) -> tuple[bool, int, int]:
        """Smaller is better."""
        return self.kv_used >= KV_FULL, self.num_sessions + self.num_waiting, self.num_running

    def look(self, stats: EngineStats, since_s: float) -> None:
        """Take note of what the engine says, ``since_s`` seconds after it was last asked."""
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
    """Siblings: where they are, and which pool their share was planned for."""

    seat: EngineState
    pool: str | None
    num_sessions: int = 0


@dataclass(slots=True)
class RouteCounts:
    """What happened besides plain routing."""

    num_sessions: int = 0
    num_moved: int = 0
    """Sessions that went on elsewhere, since their engine closed."""
    num_stolen: int = 0
    """Sessions on another pool or engine than was planned, since that one queued and this idled."""
    recomputed_tokens: int = 0
    """Prompt tokens that a moved or stolen session had in a cache it left."""
    by_pool: dict[str, dict[str, int]] = field(default_factory=dict)
    """Env id -> pool -> sessions that began there."""


class Routes:
    """Seats, and who sits where; see the module."""

    def __init__(self) -> None:
        self.seats: list[EngineState] = []
        self.sessions: dict[str, EngineState] = {}
        self.counts = RouteCounts()
        self._shares: Mapping[str, Mapping[str, float]] = {}
        self._credits: dict[str, dict[str, float]] = {}
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}

    def plan(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """Follow these shares (env id -> pool -> share) from now on; sessions stay where they are.

        An environment that is not in them goes wherever there is least to do, and so does one whose
        pools have no open engine.
        """
        self._shares = {env: dict(pools) for env, pools in shares.items()}
        self._credits.clear()

    def seat(self, request: GenerateRequest) -> EngineState | None:
        """Return where a request goes, and remember it for its session; None: nothing is open."""
        now = self.sessions.get(request.session_id)
        if now is None:
            return self._begin(request)
        if not now.open:
            return self._move(request, now)
        return self._steal_turn(request, now) or now

    def release(self, session_id: str) -> EngineState | None:
        """Forget a session; returns where it was."""
        seat = self.sessions.pop(session_id, None)
        if seat is None:
            return None
        seat.num_sessions -= 1
        group_id = self._group_of.pop(session_id, "")
        if group_id:
            group = self._groups[group_id]
            group.num_sessions -= 1
            if group.num_sessions == 0:
                del self._groups[group_id]
        return seat

    def remove(self, seat: EngineState) -> None:
        """Take a seat away; its sessions are seated anew with their next request."""
        seat.open = False
        self.seats.remove(seat)

    # A session begins

    def _begin(self, request: GenerateRequest) -> EngineState | None:
        group = self._groups.get(request.group_id) if request.group_id else None
        if group is not None and group.seat.open:
            seat, planned = group.seat, group.pool
        else:
            planned = group.pool if group is not None else self._planned_pool(request.env_id)
            found = self._choose(planned)
            if found is None:
                return None
            seat = found
            if group is not None:
                group.seat = seat
        self._charge(request.env_id, planned)
        self.counts.num_stolen += planned is not None and seat.pool != planned
        if request.session_id:
            self._sit(request, seat, planned)
        return seat

    def _sit(self, request: GenerateRequest, seat: EngineState, planned: str | None) -> None:
        self.sessions[request.session_id] = seat
        seat.num_sessions += 1
        self.counts.num_sessions += 1
        by_pool = self.counts.by_pool.setdefault(request.env_id, {})
        by_pool[seat.pool] = by_pool.get(seat.pool, 0) + 1
        if request.group_id:
            group = self._groups.setdefault(request.group_id, _Group(seat, planned))
            group.num_sessions += 1
            self._group_of[request.session_id] = request.group_id

    def _choose(self, planned: str | None) -> EngineState | None:
        """Return the least loaded seat of a pool, or an idle one elsewhere while that pool queues.

        ``planned`` None, or without an open seat, means any pool.
        """
        everywhere = [seat for seat in self.seats if seat.open]
        there = [seat for seat in everywhere if seat.pool == planned] or everywhere
        if not there:
            return None
        if len(there) < len(everywhere) and all(seat.queues for seat in there):
            idle = [seat for seat in everywhere if seat.idle]
            there = idle or there
        return min(there, key=lambda seat: seat.load)

    # Shares

    def _planned_pool(self, env_id: str) -> str | None:
        shares = dict(self._open_shares(env_id))
        if not shares:
            return None
        credit = self._credits.get(env_id, {})
        return max(shares, key=lambda pool: credit.get(pool, 0.0) + shares[pool])

    def _charge(self, env_id: str, pool: str | None) -> None:
        """Give every open pool its share of one session, and take one from ``pool``."""
        if pool is None:
            return
        credit = self._credits.setdefault(env_id, {})
        for name, share in self._open_shares(env_id):
            credit[name] = credit.get(name, 0.0) + share
        credit[pool] = credit.get(pool, 0.0) - 1.0

    def _open_shares(self, env_id: str) -> Iterator[tuple[str, float]]:
        """Yield pools that have an open seat with their shares, which add up to 1.

        A pool that is away earns nothing meanwhile: it is not flooded when it is back.
        """
        shares = self._shares.get(env_id)
        if not shares:
            return
        pools = {seat.pool for seat in self.seats if seat.open}
        total = sum(share for pool, share in shares.items() if pool in pools)
        for pool, share in shares.items():
            if pool in pools and share > 0:
                yield pool, share / total

    # A session goes on elsewhere

    def _move(self, request: GenerateRequest, old: EngineState) -> EngineState | None:
        """Seat a session whose engine closed; its siblings follow with their next requests."""
        group = self._groups.get(self._group_of.get(request.session_id, ""))
        if group is not None and group.seat.open:
            new: EngineState | None = group.seat
        else:
            new = self._choose(old.pool)
            if group is not None and new is not None:
                group.seat = new
        if new is not None:
            self._resit(request, old, new)
            self.counts.num_moved += 1
        return new

    def _steal_turn(self, request: GenerateRequest, now: EngineState) -> EngineState | None:
        """Return the idle engine that would be done sooner with a session's next turn, if any."""
        if not now.num_waiting:
            return None
        idle = next((seat for seat in self.seats if seat.idle), None)
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
    """Return whether a prompt is computed anew on an idle engine well before its turn comes here.

    Args:
        num_tokens: Of the prompt.
        queueing: Where its KV cache is.
        idle: Where nothing else waits.
    """
    rate = idle.prefill_tokens_per_s or queueing.prefill_tokens_per_s
    if not rate or not queueing.turns_per_s:
        return False  # not known yet what either costs
    wait_s = queueing.num_waiting / queueing.turns_per_s
    return wait_s > MIN_GAIN * num_tokens / rate
