"""An OpenAI-compatible endpoint without a model: a function answers, and requests are kept.

Takes: a function from (messages, tools, turn) to an answer. Gives: an
:class:`~rollart_core.contracts.agent.Endpoint` on the loopback, in separate threads, so that a
program that blocks the event loop still gets responses. Never: needs more than the standard
library, or answers a request without the key.

It serves ``/chat/completions`` (streamed on request), ``/completions`` and ``/models``. After the
budget is spent, it returns the same error as the gateway.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, TypeAlias

from rollart_core.contracts.agent import Endpoint

_MODEL: Final = "policy"
_SOCKET_S: Final = 30.0
_POLL_S: Final = 0.002

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request and its response."""

    messages: tuple[Json, ...]
    """The messages as sent; for ``/completions``, the prompt as one user message."""
    tools: tuple[Json, ...] = ()
    turn: int = 0
    """The number of answered requests before it."""
    answer: Json = field(default_factory=dict)
    """The assistant's message."""


Answer: TypeAlias = Callable[[RecordedRequest], "str | Json"]
"""From a request to the assistant's text or message; EOFError refuses it and all later requests."""


class ScriptedEndpoint:
    """An endpoint for one episode, as a context manager.

    Args:
        answer: Called in a thread for each request.
        max_requests: Requests to answer before all others are refused; None means no limit.
    """

    def __init__(self, answer: Answer, *, max_requests: int | None = None) -> None:
        self._answer, self._max_requests = answer, max_requests
        self._lock = threading.Lock()
        self._num_taken = 0
        self.asked: list[RecordedRequest] = []
        self.num_refused = 0
        """Requests beyond the budget."""
        self.strangers: list[str] = []
        """Other requests: with a wrong key, or malformed."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.gateway_session = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="rollart-endpoint", daemon=True
        )
        port = self._server.server_address[1]
        key = f"sk-{secrets.token_hex(8)}"
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", key, _MODEL)

    def __enter__(self) -> ScriptedEndpoint:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop_answering()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def messages(self) -> tuple[Json, ...]:
        """The conversation of the last request, its answer included."""
        return (*self.asked[-1].messages, self.asked[-1].answer) if self.asked else ()

    def stop_answering(self) -> None:
        """Refuse all requests from now on."""
        with self._lock:
            self._max_requests = 0

    def take(self, body: Json) -> RecordedRequest | None:
        """Answer one request; None if the budget is spent."""
        messages = tuple(body["messages"]) if "messages" in body else _of_prompt(body)
        with self._lock:
            spent = self._max_requests is not None and self._num_taken >= self._max_requests
            if spent:
                self.num_refused += 1
                return None
            turn, self._num_taken = self._num_taken, self._num_taken + 1
        asked = RecordedRequest(messages, tuple(body.get("tools") or ()), turn)
        try:
            said = self._answer(asked)
        except EOFError:
            self.stop_answering()
            self.num_refused += 1
            return None
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        whole = RecordedRequest(asked.messages, asked.tools, turn, message)
        with self._lock:
            self.asked.append(whole)
        return whole


def call_tool(name: str, arguments: Mapping[str, object] | str, call_id: str = "call_0") -> Json:
    """Return an assistant's message that calls a tool.

    Args:
        name: Name of the tool.
        arguments: A mapping, or text that may be invalid JSON.
        call_id: Id for the tool's result.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
    function = {"name": name, "arguments": text}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _of_prompt(body: Json) -> tuple[Json, ...]:
    return ({"role": "user", "content": str(body["prompt"])},)


class _Server(ThreadingHTTPServer):
    gateway_session: ScriptedEndpoint
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a program that disconnects early."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SOCKET_S

    def do_GET(self) -> None:
        """List the one model."""
        if self._is_known():
            self._send(200, {"object": "list", "data": [{"id": _MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a completion."""
        if not self._is_known():
            return
        is_chat = self.path.endswith("/chat/completions")
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
            if not is_chat and not self.path.endswith("/completions"):
                self.server.gateway_session.strangers.append(f"POST {self.path}")
                self._refuse(404, "not_found", f"there is no {self.path}")
                return
            _expect_form(body, "messages" if is_chat else "prompt")
        except ValueError as e:
            self.server.gateway_session.strangers.append(f"POST {self.path}: {e}")
            self._refuse(400, "invalid_request", str(e))
            return
        asked = self.server.gateway_session.take(body)
        if asked is None:
            self._refuse(400, "budget_spent", "this episode has used up its turns")
        elif body.get("stream"):
            self._stream(asked, is_chat=is_chat)
        else:
            self._send(200, _completion(asked, is_chat=is_chat))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to stderr."""

    def _is_known(self) -> bool:
        gateway_session = self.server.gateway_session
        if self.headers.get("authorization") == f"Bearer {gateway_session.endpoint.api_key}":
            return True
        gateway_session.strangers.append(f"{self.command} {self.path} without this episode's key")
        self._refuse(401, "invalid_api_key", "not the key of this episode")
        return False

    def _refuse(self, status: int, code: str, message: str) -> None:
        kind = "invalid_request_error"
        self._send(status, {"error": {"message": message, "type": kind, "code": code}})

    def _send(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content)

    def _stream(self, asked: RecordedRequest, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for chunk in _chunks(asked, is_chat=is_chat):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def _expect_form(body: object, key: str) -> None:
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    messages = body.get(key)
    if key == "prompt" and isinstance(messages, str):
        return
    is_messages = isinstance(messages, list) and all(
        isinstance(m, dict) and "role" in m for m in messages
    )
    if not messages or not is_messages:
        raise ValueError(f"the body has no {key}")


def _completion(asked: RecordedRequest, *, is_chat: bool) -> Json:
    choice: Json = {"index": 0, "finish_reason": _reason(asked.answer)}
    choice |= {"message": asked.answer} if is_chat else {"text": asked.answer["content"] or ""}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {**_head(asked, is_chat=is_chat), "choices": [choice], "usage": usage}


def _chunks(asked: RecordedRequest, *, is_chat: bool) -> Sequence[Json]:
    head = _head(asked, is_chat=is_chat)
    calls = asked.answer.get("tool_calls") or ()
    delta = {**asked.answer, "tool_calls": [{"index": n, **c} for n, c in enumerate(calls)]}
    said: Json = {"delta": delta} if is_chat else {"text": asked.answer["content"] or ""}
    if is_chat:
        head["object"] = "chat.completion.chunk"
    first = {**head, "choices": [{"index": 0, "finish_reason": None, **said}]}
    end: Json = {"delta": {}} if is_chat else {"text": ""}
    end |= {"index": 0, "finish_reason": _reason(asked.answer)}
    return first, {**head, "choices": [end]}


def _head(asked: RecordedRequest, *, is_chat: bool) -> Json:
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": f"cmpl-{asked.turn}", "object": kind, "created": 0, "model": _MODEL}


def _reason(message: Json) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
