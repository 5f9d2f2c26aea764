"""A real HTTP server of the OpenAI-compatible protocol, with vLLM's additions or without."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from aiohttp import web

from rollart_core.models.tokenizer import ChatTokenizer
from support.pace import scaled

Json = dict[str, Any]
Scripted = tuple[int, Any, Mapping[str, str]]
"""Status, body (JSON, or bytes as they are) and headers of an answer out of turn."""


def obedient(text: str) -> str:
    """Say the word that ``text`` asks for last."""
    return text.rsplit("say ", 1)[-1].split("<")[0].strip()


def failing(status: int, message: str, code: str | None = None, **headers: str) -> Scripted:
    """Return an error as OpenAI's own servers spell it."""
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code}}
    return status, body, {name.replace("_", "-"): value for name, value in headers.items()}


class OpenAIServer:
    """A server on a free port, in a thread with a loop of its own.

    Args:
        say: From the newest message (or the whole prompt) to the answer.
        tokenizer: With one it has vLLM's additions: ``/tokenize``, prompts of token ids, and token
            ids and logprobs in what ``/v1/completions`` answers.
        key: What clients must send.
        models: Their names; none: there is no list.
        lacks: Of vLLM's additions: ``tokenize``, or the fields of ``token_ids`` (before 0.10.2),
            which leaves them in the names of the tokens.
    """

    def __init__(
        self,
        say: Callable[[str], str] = obedient,
        *,
        tokenizer: ChatTokenizer | None = None,
        key: str = "",
        models: Sequence[str] = ("parrot",),
        max_model_len: int = 4096,
        lacks: Sequence[str] = (),
        delay_s: float = 0.0,
    ) -> None:
        self.say, self.tokenizer, self.key, self.models = say, tokenizer, key, models
        self.max_model_len, self.lacks, self.delay_s = max_model_len, lacks, delay_s
        self.requests: list[tuple[str, Json]] = []
        self.headers: list[Mapping[str, str]] = []
        self.script: deque[Scripted] = deque()
        """Answers to what comes next on the generating paths, before it says anything itself."""
        self.change: Callable[[Json], Any] = lambda answer: answer
        """From a right answer to what is sent."""
        self.num_hung_up = 0
        self.url = ""

    def __enter__(self) -> OpenAIServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(
            scaled(60)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(scaled(60))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add_routes(self, app: web.Application) -> None:
        """Add what only some servers have."""

    def bodies(self, path: str) -> list[Json]:
        """Return what came to a path."""
        return [body for where, body in self.requests if where == path]

    async def _begin(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        self.add_routes(app)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return runner

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            return _answer(failing(401, f"Incorrect API key provided: {given}.", "invalid_api_key"))
        body = await request.json() if request.can_read_body else {}
        self.requests.append((request.path, body))
        if request.path.endswith("completions"):
            if self.script:
                return _answer(self.script.popleft())
            if body.get("model") not in (*self.models, "anything"):
                what = f"The model `{body.get('model')}` does not exist."
                return _answer(failing(404, what, "model_not_found"))
            try:
                await asyncio.sleep(self.delay_s)
            except asyncio.CancelledError:
                self.num_hung_up += 1
                raise
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        if not self.models:
            return _answer(failing(404, "Not Found"))
        length = {"max_model_len": self.max_model_len} if self.tokenizer else {}
        rows = [{"id": name, "object": "model", **length} for name in self.models]
        return web.json_response({"object": "list", "data": rows})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        words = self.say(body["messages"][-1]["content"])
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": words},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
        }
        return _answer((200, self.change(answer), {}))

    async def _complete(self, request: web.Request) -> web.Response:
        body, tokenizer = (await request.json()), self.tokenizer
        assert tokenizer is not None, "this server is asked in text"
        prompt = body["prompt"]
        given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if len(given) + body["max_tokens"] > self.max_model_len:
            what = f"This model's maximum context length is {self.max_model_len} tokens."
            return web.json_response(
                {"object": "error", "message": what, "type": "BadRequestError", "code": 400},
                status=400,
            )
        words = self.say(tokenizer.decode(given))
        ids = [*tokenizer.encode(words), tokenizer.stop_token_ids[0]][: body["max_tokens"]]
        named = body.get("return_tokens_as_token_ids")
        logprobs = {
            "tokens": [f"token_id:{i}" if named else tokenizer.decode([i]) for i in ids],
            "token_logprobs": [-0.25 * (n + 1) for n in range(len(ids))],
            "top_logprobs": None,
            "text_offset": [],
        }
        choice: Json = {"index": 0, "text": words, "logprobs": logprobs, "finish_reason": "stop"}
        if body.get("return_token_ids") and "token_ids" not in self.lacks:
            choice |= {"token_ids": ids, "prompt_token_ids": given}
        usage = {
            "prompt_tokens": len(given),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        answer = {"id": "cmpl-1", "model": body["model"], "choices": [choice], "usage": usage}
        return _answer((200, self.change(answer), {}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None or "tokenize" in self.lacks:
            return _answer(failing(404, "Not Found"))
        ids = self.tokenizer.encode((await request.json())["prompt"])
        found = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
        return web.json_response(found)


def _answer(scripted: Scripted) -> web.Response:
    status, body, headers = scripted
    if isinstance(body, bytes):
        return web.Response(status=status, body=body, headers=headers)
    return web.json_response(body, status=status, headers=headers)
