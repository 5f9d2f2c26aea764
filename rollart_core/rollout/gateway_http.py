"""The HTTP side of the gateway: routes, keys, streams, errors.

Takes: HTTP requests. Gives: HTTP answers in the shape of OpenAI's API. Never: decides what is
recorded. A program that hangs up cancels its handler, and with it the generation.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from rollart_core.errors import InferenceFailure
from rollart_core.rollout.gateway_body import Body, Wishes, parse
from rollart_core.rollout.gateway_chat import chat_chunks, chat_request, chat_response
from rollart_core.rollout.gateway_errors import RequestError, engine_failed, unsupported
from rollart_core.rollout.gateway_seat import GatewaySeat
from rollart_core.rollout.gateway_shape import Said
from rollart_core.rollout.transcript import Ask, Transcript

if TYPE_CHECKING:
    from rollart_core.rollout.gateway import Gateway

_Handler: TypeAlias = Callable[[web.Request, GatewaySeat], Awaitable[web.StreamResponse]]

_SHUTDOWN_S = 1.0
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class GatewayServer:
    """Listens for a gateway.

    Args:
        gateway: Whose episodes are served.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.url = ""
        app = web.Application(client_max_size=gateway.settings.max_body_bytes)
        for prefix in ("/v1", "/episodes/{slug}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._with_seat(self._chat))
            app.router.add_get(f"{prefix}/models", self._with_seat(self._models))
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._with_seat(self._model))
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: When the address is taken.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        bound = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    async def close(self) -> None:
        """Stop listening and end all connections."""
        await self._runner.cleanup()

    def _with_seat(
        self, handler: _Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that knows whose request it is, and answers errors in shape."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._handled(handler, request)
            except RequestError as e:
                return _refusal(e)

        return handle

    async def _handled(self, handler: _Handler, request: web.Request) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        seat = self._gateway.seat_of(key, request.match_info.get("slug", ""))
        try:
            return await handler(request, seat)
        except (RequestError, web.HTTPException, ConnectionError):
            raise
        except Exception as e:  # a fault of ours: the episode is not to be blamed for it
            seat.fail(InferenceFailure(f"gateway: {type(e).__name__}: {e}", boundary="gateway"))
            raise engine_failed(e, 500) from e

    async def _chat(self, request: web.Request, seat: GatewaySeat) -> web.StreamResponse:
        asked = chat_request(await _body(request))
        tokenizer = self._gateway.tokenizer
        if asked.tools and not (tokenizer.template.shows_tools and tokenizer.tool_format):
            raise unsupported("tools", "the chat template of this model knows no tools")
        said = await self._said(seat, lambda t: t.ask(asked.messages, asked.tools), asked.wishes)
        if asked.wishes.stream:
            return await _stream(request, chat_chunks(said, tokenizer))
        return _json(chat_response(said, tokenizer))

    async def _said(
        self, seat: GatewaySeat, show: Callable[[Transcript], Ask], wishes: Wishes
    ) -> Said:
        ask, answer, request_id = await seat.answer(show, wishes)
        return Said(ask, answer, wishes, request_id, self._gateway.settings.model)

    async def _models(self, request: web.Request, seat: GatewaySeat) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card(self._gateway.settings.model)]})

    async def _model(self, request: web.Request, seat: GatewaySeat) -> web.StreamResponse:
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


async def _body(request: web.Request) -> Body:
    try:
        return parse(await request.read())
    except web.HTTPRequestEntityTooLarge as e:
        raise RequestError("the body is too large", status=413, code="body_too_large") from e


def _json(value: object) -> web.Response:
    return web.Response(body=_dumped(value), content_type="application/json")


def _refusal(error: RequestError) -> web.Response:
    response = web.Response(
        body=_dumped(error.body()), status=error.status, content_type="application/json"
    )
    response.headers["x-should-retry"] = "true" if error.retried else "false"
    return response


async def _stream(request: web.Request, chunks: Iterable[dict[str, Any]]) -> web.StreamResponse:
    """Send an answer as server-sent events, all at once: engines answer whole turns."""
    events = [b"data: " + _dumped(chunk) + b"\n\n" for chunk in chunks]
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    await response.write(b"".join([*events, b"data: [DONE]\n\n"]))
    await response.write_eof()
    return response


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
