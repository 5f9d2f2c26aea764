"""Connections to the gateway whose request does not come: they are closed.

Takes: the protocol factory of an HTTP server. Gives: one whose connections are aborted when the
head of a request is not whole in time. Never: reads HTTP; a head is whole when its handler begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Heads:
    """Times the heads of requests.

    Args:
        limit_s: How long one may take, from its first byte; of a new connection, from its
            beginning.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._open: dict[asyncio.BaseTransport, _Connection] = {}

    def watched(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of the same protocols, each timed."""
        return lambda: _Connection(factory(), self._limit_s, self._open)

    @web.middleware  # type: ignore[untyped-decorator]
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Take note of when a handler begins and ends; the application has to have it."""
        connection = None if request.transport is None else self._open.get(request.transport)
        if connection is None:
            return await handler(request)
        connection.begins()
        try:
            return await handler(request)
        finally:
            connection.ends()


class _Connection(asyncio.Protocol):
    """Passes all on to a protocol, and keeps the time while no handler runs."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        limit_s: float,
        others: dict[asyncio.BaseTransport, _Connection],
    ) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._others = others
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_handled = False

    def begins(self) -> None:
        """Take note that a head is whole, and its handler begins."""
        self._is_handled = True
        self._stop()

    def ends(self) -> None:
        """Take note that the handler has ended: what comes now is the next head."""
        self._is_handled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._others[transport] = self
        self._start()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass data on; the first of a head begins its time."""
        if not self._is_handled:
            self._start()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end on."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Pass the loss on."""
        self._stop()
        if self._transport is not None:
            self._others.pop(self._transport, None)
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()

    def _start(self) -> None:
        if self._timer is None and self._transport is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
