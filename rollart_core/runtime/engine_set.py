"""The inference engines of a run: started together, and more or fewer later.

Takes: how one engine is made, by its number. Gives: engines behind a router. Never: gives an engine
requests before it holds the newest weights, or ends one that still answers (the router sees to
both).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from rollart_core.errors import UserError
from rollart_core.inference.router import Router
from rollart_core.runtime.remote import RemoteEngine


class Reservations(Protocol):
    """Whoever has the room that parts need: a cluster reserves it, one machine just has it."""

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        """Make room for one more part; ``pool`` None: wherever it fits best.

        Raises:
            UserError: When there is none.
        """

    async def release_reservation(self, role: str, index: int) -> None:
        """Give up the room of a part that has left for good."""


class EngineSet:
    """Engines that may become more or fewer; see the module.

    Args:
        new_engine: Returns the unstarted engine of a number.
        rooms: Where they find room.
        load_limit_s: See :class:`rollart_core.inference.router.Router`.
    """

    def __init__(
        self, new_engine: Callable[[int], RemoteEngine], rooms: Reservations, *, load_limit_s: float
    ) -> None:
        self._new_engine = new_engine
        self._rooms = rooms
        self._load_limit_s = load_limit_s
        self._next = 0
        self._engines: dict[int, RemoteEngine] = {}
        self._joining: set[RemoteEngine] = set()
        self._router: Router | None = None

    @property
    def started(self) -> bool:
        """True once there is a router."""
        return self._router is not None

    @property
    def router(self) -> Router:
        """In front of them, once they are started."""
        assert self._router is not None
        return self._router

    @property
    def counts(self) -> Counter[str]:
        """How many there are in each pool, without those that are lost for good."""
        return Counter(e.pool for e in self._engines.values() if e.health != "lost")

    def gauges(self) -> dict[str, float]:
        """Return how they are, and what they have to do, as metrics."""
        seats, counts = self.router.seats, self.router.counts
        num_open = sum(seat.open for seat in seats)
        return {
            "engines/num": len(seats),
            "engines/up": num_open,
            "engines/restarts": sum(e.num_restarts for e in self._engines.values()),
            "engines/sessions": sum(seat.num_sessions for seat in seats),
            "engines/waiting": sum(seat.num_waiting for seat in seats),
            "engines/kv_used": sum(seat.kv_used for seat in seats) / max(1, num_open),
            "router/moved": counts.num_moved,
            "router/stolen": counts.num_stolen,
            "router/recomputed_tokens": counts.recomputed_tokens,
        }

    async def start(self, count: int) -> None:
        """Start the first ones, all at once."""
        self._engines = {index: self._new_engine(index) for index in range(count)}
        self._next = count
        await asyncio.gather(*(engine.start() for engine in self._engines.values()))
        self._router = Router(list(self._engines.values()), load_limit_s=self._load_limit_s)
        self._router.watch()

    async def resize(self, count: int, pool: str | None = None) -> None:
        """Have this many, in a pool or in all.

        Raises:
            UserError: When none would be left, or there is no room.
            Exception: What kept one from starting; those that did start stay.
        """
        elsewhere = self.counts.total() - self._count(pool)
        if elsewhere + count < 1:
            raise UserError(f"{pool or 'engines'}={count}: a run needs at least one engine")
        missing = count - self._count(pool)
        if missing > 0:
            joined = await asyncio.gather(
                *(self._add(pool) for _ in range(missing)), return_exceptions=True
            )
            for error in joined:
                if isinstance(error, BaseException):
                    raise error
        while self._count(pool) > count:
            await self._remove(self._last(pool))
        for index in [i for i, e in self._engines.items() if e.health == "lost"]:
            await self._remove(index)

    async def close(self) -> None:
        """End them all."""
        if self._router is not None:
            await self._router.close()
        ending: Sequence[RemoteEngine] = [*self._engines.values(), *self._joining]
        await asyncio.gather(*(engine.close() for engine in ending), return_exceptions=True)

    def _count(self, pool: str | None) -> int:
        return self.counts.total() if pool is None else self.counts[pool]

    def _last(self, pool: str | None) -> int:
        """Return the number of the engine to part with: one that is down, or the newest.

        No pool, and so no class of engines, loses its last one while another has several.
        """
        there = [i for i, e in self._engines.items() if pool in (None, e.pool)]
        there = [i for i in there if self._engines[i].health != "lost"]
        counts = self.counts
        there = [i for i in there if counts[self._engines[i].pool] > 1] or there
        return max(there, key=lambda i: (self._engines[i].health != "up", i))

    async def _add(self, pool: str | None) -> None:
        index, self._next = self._next, self._next + 1
        await self._rooms.reserve("engine", index, pool)
        engine = self._new_engine(index)
        self._joining.add(engine)
        try:
            await engine.start()
            await self.router.add(engine)
        except BaseException:
            await engine.close()
            await self._rooms.release_reservation("engine", index)
            raise
        finally:
            self._joining.discard(engine)
        self._engines[index] = engine

    async def _remove(self, index: int) -> None:
        engine = self._engines[index]
        try:
            await self.router.remove(engine)
        finally:  # also when the run's end cuts it short
            try:
                await engine.close()
                del self._engines[index]  # not before: `close` must find it
            finally:
                await self._rooms.release_reservation("engine", index)
