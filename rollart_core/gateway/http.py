"""The HTTP server of the gateway: routes, keys, streams, errors and idle connections.

Takes: HTTP requests. Gives: HTTP responses in the format of OpenAI's API. Never: decides what is
recorded. If a program disconnects, its handler and the generation are cancelled. A connection is
aborted if the head of a request is not complete in time (:class:`Heads`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from aiohttp import web

from rollart_core.errors import InferenceFailure, first_line
from rollart_core.gateway.body import Body, SamplingRequest, parse, prompt_chars
from rollart_core.gateway.errors import RequestError, engine_failed, unsupported
from rollart_core.gateway.formats import (
    ChatRequest,
    Said,
    chat_chunks,
    chat_request,
    chat_response,
    response,
    response_events,
    response_id,
    response_request,
    text_chunks,
    text_request,
    text_response,
)
from rollart_core.gateway.session import HEAVY_CHARS, GatewaySession
from rollart_core.gateway.transcript import ModelCall, Transcript

if TYPE_CHECKING:
    from rollart_core.gateway.gateway import Gateway


_Handler: TypeAlias = Callable[[web.Request, GatewaySession], Awaitable[web.StreamResponse]]

_T = TypeVar("_T")
_SHUTDOWN_S = 1.0
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_RawHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayServer:
    """The HTTP server of a gateway.

    Args:
        gateway: The gateway with the episodes.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.url = ""
        self._listening: asyncio.Server | None = None
        self._heads = Heads(gateway.settings.stall_s)
        app = web.Application(
            client_max_size=gateway.settings.max_body_bytes, middlewares=[self._heads.middleware]
        )
        for prefix in ("/v1", "/episodes/{slug}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._with_session(self._chat))
            app.router.add_post(f"{prefix}/completions", self._with_session(self._text))
            app.router.add_post(f"{prefix}/responses", self._with_session(self._response))
            app.router.add_get(f"{prefix}/models", self._with_session(self._models))
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._with_session(self._model))
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            logger=_quiet(),
            shutdown_timeout=_SHUTDOWN_S,
        )

    async def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: If the address is in use.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        factory = self._heads.watched(self._runner.server)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(factory, host, port, backlog=1024)
        bound, name = self._listening.sockets[0].getsockname()[1], _name_of(host)
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{bound}"

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def _with_session(
        self, handler: _Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that finds the session and returns errors in the API format."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._handled(handler, request)
            except RequestError as e:
                return _refusal(e)

        return handle

    async def _handled(self, handler: _Handler, request: web.Request) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        gateway_session = self._gateway.session_of(key, request.match_info.get("slug", ""))
        try:
            return await handler(request, gateway_session)
        except (RequestError, web.HTTPException, ConnectionError):
            raise
        except Exception as e:  # an internal error, which is not the fault of the episode
            gateway_session.fail(
                InferenceFailure(f"gateway: {type(e).__name__}: {e}", boundary="gateway")
            )
            raise engine_failed(e, 500) from e

    async def _chat(
        self, request: web.Request, gateway_session: GatewaySession
    ) -> web.StreamResponse:
        asked = await self._asked(request, chat_request)
        said = await self._said_in_talk(gateway_session, asked)
        tokenizer = self._gateway.tokenizer
        if asked.sampling_request.stream:
            return await _stream(request, _data(chat_chunks(said, tokenizer)))
        return _json(chat_response(said, tokenizer))

    async def _text(
        self, request: web.Request, gateway_session: GatewaySession
    ) -> web.StreamResponse:
        tokenizer = self._gateway.tokenizer
        asked = await self._asked(request, lambda body: text_request(body, tokenizer.vocab_size))
        length = len(asked.prompt) if isinstance(asked.prompt, str) else 0
        show = partial(Transcript.ask_text, prompt=asked.prompt)
        said = await self._said(gateway_session, show, asked.sampling_request, length)
        if asked.sampling_request.stream:
            return await _stream(request, _data(text_chunks(said, tokenizer)))
        return _json(text_response(said, tokenizer))

    async def _response(
        self, request: web.Request, gateway_session: GatewaySession
    ) -> web.StreamResponse:
        asked = await self._asked(
            request, lambda body: response_request(body, gateway_session.responses)
        )
        said = await self._said_in_talk(gateway_session, asked)
        gateway_session.responses[response_id(said)] = [*asked.talk, said.message]
        if asked.sampling_request.stream:
            return await _stream(request, _named(response_events(asked, said)))
        return _json(response(asked, said))

    async def _asked(self, request: web.Request, read: Callable[[Body], _T]) -> _T:
        """Return the parsed request. A long body is parsed in a thread."""
        raw = await _body(request, self._gateway.settings.stall_s)
        if len(raw) < HEAVY_CHARS:
            return read(parse(raw))
        return await self._gateway.threads.run(lambda: read(parse(raw)))

    async def _said_in_talk(self, gateway_session: GatewaySession, asked: ChatRequest) -> Said:
        """Answer a conversation. Reject tools if the chat template does not render them."""
        tokenizer = self._gateway.tokenizer
        if asked.tools and tokenizer.tool_format is None:
            raise unsupported("tools", "the chat template of this model does not support tools")
        show = partial(Transcript.ask, messages=asked.messages, tools=asked.tools)
        length = prompt_chars(asked.messages, asked.tools)
        return await self._said(gateway_session, show, asked.sampling_request, length)

    async def _said(
        self,
        gateway_session: GatewaySession,
        show: Callable[[Transcript], ModelCall],
        sampling_request: SamplingRequest,
        num_chars: int,
    ) -> Said:
        ask, answer, request_id = await gateway_session.answer(show, sampling_request, num_chars)
        return Said(ask, answer, sampling_request, request_id, self._gateway.settings.model)

    async def _models(
        self, request: web.Request, gateway_session: GatewaySession
    ) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card(self._gateway.settings.model)]})

    async def _model(
        self, request: web.Request, gateway_session: GatewaySession
    ) -> web.StreamResponse:
        return _json(self._card(request.match_info["model"]))

    def _card(self, model: str) -> dict[str, Any]:
        gateway = self._gateway
        return {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "rollart",
            "max_model_len": gateway.settings.max_context_tokens,
            "tokenizer_fingerprint": gateway.tokenizer.fingerprint,
        }

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok", "episodes": self._gateway.num_episodes})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        message = f"there is no {request.method} {request.path}"
        return _refusal(RequestError(message, status=404, code="unknown_url"))


def _name_of(host: str) -> str:
    """Return the name of the host, or the machine's external address for a wildcard."""
    families = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
    if host not in families:
        return host
    far = ("192.0.2.1", 9) if host == "0.0.0.0" else ("2001:db8::1", 9)
    with socket.socket(families[host], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(far)  # a datagram socket: nothing is sent
        except OSError:
            return "127.0.0.1" if host == "0.0.0.0" else "::1"
        return str(probe.getsockname()[0])


def _quiet() -> logging.Logger:
    """Return a silent logger. Invalid HTTP gets a response and is the program's fault."""
    logger = logging.getLogger("rollart.gateway")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


async def _body(request: web.Request, stall_s: float) -> bytes:
    """Return the body.

    Raises:
        RequestError: If it is too large, or cannot be read.
        ConnectionResetError: If the rest of it did not arrive, and the connection is closed.
    """
    too_large = RequestError("the body is too large", status=413, code="body_too_large")
    if (request.content_length or 0) > request.client_max_size:
        raise too_large
    chunks, num_bytes = list[bytes](), 0
    try:
        while True:
            async with asyncio.timeout(stall_s):
                chunk = await request.content.readany()
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > request.client_max_size:
                raise too_large
    except TimeoutError as e:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the rest of a body did not arrive for {stall_s:g} s") from e
    except web.RequestPayloadError as e:
        raise RequestError(f"the body cannot be read: {first_line(str(e.__cause__ or e))}") from e


def _json(value: object) -> web.Response:
    return web.Response(body=_dumped(value), content_type="application/json")


def _refusal(error: RequestError) -> web.Response:
    answer = web.Response(
        body=_dumped(error.body()), status=error.status, content_type="application/json"
    )
    answer.headers["x-should-retry"] = "true" if error.retried else "false"
    return answer


def _data(chunks: Iterable[dict[str, Any]]) -> list[bytes]:
    """Return chunks as events, followed by the event that ends a stream."""
    return [*(b"data: " + _dumped(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def _named(events: Iterable[dict[str, Any]]) -> list[bytes]:
    return [
        f"event: {event['type']}\ndata: ".encode() + _dumped(event) + b"\n\n" for event in events
    ]


async def _stream(request: web.Request, events: Sequence[bytes]) -> web.StreamResponse:
    """Send a response as server-sent events, all together, because engines return whole turns."""
    answer = web.StreamResponse(headers=_EVENTS)
    await answer.prepare(request)
    await answer.write(b"".join(events))
    await answer.write_eof()
    return answer


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Heads:
    """Enforces a time limit for the heads of requests.

    Args:
        limit_s: Maximum seconds of a head, from its first byte. For a new connection, from its
            start.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._open: dict[asyncio.BaseTransport, _Connection] = {}

    def watched(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of the same protocols with the time limit."""
        return lambda: _Connection(factory(), self._limit_s, self._open)

    @web.middleware  # type: ignore[untyped-decorator]
    async def middleware(self, request: web.Request, handler: _RawHandler) -> web.StreamResponse:
        """Record the start and end of a handler. The application must use this middleware."""
        connection = None if request.transport is None else self._open.get(request.transport)
        if connection is None:
            return await handler(request)
        connection.begins()
        try:
            return await handler(request)
        finally:
            connection.ends()


class _Connection(asyncio.Protocol):
    """Forwards everything to a protocol, and enforces the time limit while no handler runs."""

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
        """Record that a head is complete and its handler begins."""
        self._is_handled = True
        self._stop()

    def ends(self) -> None:
        """Record that the handler has ended. The next data belong to the next head."""
        self._is_handled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer for the first head."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._others[transport] = self
        self._start()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Forward data. The first data of a head start the timer."""
        if not self._is_handled:
            self._start()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward the end of the stream."""
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Forward the loss of the connection."""
        self._stop()
        if self._transport is not None:
            self._others.pop(self._transport, None)
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """Forward the call."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward the call."""
        self._inner.resume_writing()

    def _start(self) -> None:
        if self._timer is None and self._transport is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
