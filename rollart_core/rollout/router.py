"""Which engine answers which trajectory.

Takes: the engines of a run. Gives: ``generate`` that keeps a session on the engine that holds its
KV cache and sends new ones, siblings together, to the least loaded. Never: samples or batches.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)


@dataclass(slots=True, eq=False)
class _Seat:
    """An engine and how much it has to do."""

    engine: InferenceEngine
    num_running: int = 0
    num_sessions: int = 0


class Router:
    """Spreads sessions over engines; see the module."""

    def __init__(self, engines: Sequence[InferenceEngine]) -> None:
        """Route over these engines.

        Raises:
            ValueError: When there is none.
        """
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._seats = [_Seat(engine) for engine in engines]
        self._sessions: dict[str, _Seat] = {}
        self._groups: dict[str, _Seat] = {}
        self._group_sizes: defaultdict[str, int] = defaultdict(int)
        self._session_groups: dict[str, str] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the engine that holds the session, or on the least loaded one."""
        seat = self._seat(request)
        seat.num_running += 1
        try:
            return await seat.engine.generate(request)
        finally:
            seat.num_running -= 1

    async def release(self, session_id: str) -> None:
        """Forget a session everywhere."""
        seat = self._sessions.pop(session_id, None)
        if seat is None:
            return
        seat.num_sessions -= 1
        group_id = self._session_groups.pop(session_id, "")
        if group_id:
            self._group_sizes[group_id] -= 1
            if self._group_sizes[group_id] == 0:
                del self._group_sizes[group_id], self._groups[group_id]
        await seat.engine.release(session_id)

    async def load_weights(self, policy_version: int) -> list[WeightSwap]:
        """Swap every engine to a version; returns when all hold it."""
        swaps = (seat.engine.load_weights(policy_version) for seat in self._seats)
        return list(await asyncio.gather(*swaps))

    async def stats(self) -> list[EngineStats]:
        """Return the counters of every engine."""
        return list(await asyncio.gather(*(seat.engine.stats() for seat in self._seats)))

    def _seat(self, request: GenerateRequest) -> _Seat:
        seat = self._sessions.get(request.session_id)
        if seat is not None:
            return seat
        seat = self._groups.get(request.group_id) if request.group_id else None
        if seat is None:
            seat = min(self._seats, key=lambda s: (s.num_sessions, s.num_running))
        if request.session_id:
            self._sessions[request.session_id] = seat
            seat.num_sessions += 1
            if request.group_id:
                self._groups[request.group_id] = seat
                self._group_sizes[request.group_id] += 1
                self._session_groups[request.session_id] = request.group_id
        return seat
