"""One worker of the pool, as the pool sees it.

Takes: calls of the wire. Gives: answers, in whatever order they come. Never: answers after it is
gone (what waits fails), or waits for a worker that is past the deadline of a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollart_core.errors import BackendFailure, first_line
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.carriers import Carrier
from rollart_plugins.serverless.worker import READY

_GRACE_S = 0.25
"""How long after its deadline an answer may still come before the worker is killed."""
_CLOSE_S = 0.02
"""What is given up so close to its deadline is given up for its deadline."""

NewCarrier = Callable[[Callable[[bytes], None], Callable[[str], None]], Carrier]


class CannotStart(Exception):
    """The reward cannot be made in a worker: another worker would do no better."""


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[bytes]
    weight: int
    timer: asyncio.TimerHandle


class PoolWorker:
    """A worker; see the module.

    Args:
        new_carrier: Makes what it runs in.
        settle: Called after each answer.
        lost: Called when it is gone, or past a deadline.
    """

    def __init__(
        self,
        new_carrier: NewCarrier,
        settle: Callable[[PoolWorker], None],
        lost: Callable[[PoolWorker], None],
    ) -> None:
        self._settle, self._lost = settle, lost
        self._carrier = new_carrier(self._take, self._gone)
        self._asked: dict[int, _Pending] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle: asyncio.TimerHandle | None = None
        self.num_busy = 0
        """Requests that it has."""
        self.retired = False
        """Set when it gets no more."""

    async def start(self, hello: Mapping[str, object]) -> None:
        """Start it and wait until it can score.

        Raises:
            CannotStart: When it says that it cannot.
            BackendFailure: When it is gone before it said anything.
        """
        await self._carrier.start()
        self._carrier.write(wire.dumps(hello) + b"\n")
        await self._ready

    async def ask(self, number: int, body: bytes, *, weight: int, deadline_s: float) -> bytes:
        """Return its answer to a call.

        Args:
            number: Of the call; no other of this worker has it.
            body: The call.
            weight: Requests in it, counted in ``num_busy`` already.
            deadline_s: Seconds after which a worker that has not answered is past help.

        Raises:
            BackendFailure: When it is gone.
        """
        loop = asyncio.get_running_loop()
        self._stop_watching()
        due_s = loop.time() + deadline_s
        timer = loop.call_at(due_s + _GRACE_S, self._overdue, number)
        asked = self._asked[number] = _Pending(loop.create_future(), weight, timer)
        self._carrier.write(b"%d %b\n" % (number, body))
        try:
            return await asked.future
        except asyncio.CancelledError:
            # It was to answer before: whoever asks next should not wait for it too.
            self.retired = self.retired or loop.time() > due_s - _CLOSE_S
            raise

    def watch_idle(self, idle_s: float, end: Callable[[], None]) -> None:
        """Call ``end`` if nothing is asked for so long."""
        self._stop_watching()
        self._idle = asyncio.get_running_loop().call_later(idle_s, self._look, end)

    async def close(self, *, kill: bool = False) -> None:
        """End it; what waits fails. May be called twice."""
        self._stop_watching()
        self._fail("the worker was ended")
        await self._carrier.close(kill=kill)

    def _look(self, end: Callable[[], None]) -> None:
        if not self.num_busy:
            end()

    def _stop_watching(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _take(self, line: bytes) -> None:
        head, _, body = line.partition(b" ")
        if not self._ready.done():
            self._begin(head, body)
            return
        try:
            asked = self._asked.pop(int(head))
        except (ValueError, KeyError):
            self._gone("it does not speak as a worker does")
            return
        asked.timer.cancel()
        self.num_busy -= asked.weight
        if not asked.future.done():
            asked.future.set_result(body)
        self._settle(self)

    def _begin(self, head: bytes, body: bytes) -> None:
        if head == READY:
            self._ready.set_result(None)
            return
        try:
            message = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            message = f"it said {first_line(body.decode(errors='replace'), 100)!r}"
        self._ready.set_exception(CannotStart(message))

    def _overdue(self, number: int) -> None:
        if number in self._asked:
            self._fail("the worker hung past the deadline of a call, and was killed")
            self._lost(self)

    def _gone(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(BackendFailure(f"the worker ended at once: {why}"))
            self._ready.exception()  # the start may have been given up
            return
        self._fail(f"the worker is gone: {why}")
        self._lost(self)

    def _fail(self, why: str) -> None:
        asked, self._asked = list(self._asked.values()), {}
        for one in asked:
            one.timer.cancel()
            self.num_busy -= one.weight
            if not one.future.done():
                one.future.set_exception(BackendFailure(why))
                one.future.exception()  # whoever asked may have gone
