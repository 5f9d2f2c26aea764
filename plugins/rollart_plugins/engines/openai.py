"""The ``openai`` engine: any OpenAI-compatible server, with token ids or with text.

    model.path           token ids -> /completions       -> token ids and logprobs (vLLM)
    model.kind: remote   messages  -> /chat/completions  -> text (any server): evaluation only

At the start, the engine checks which model the server has, and whether the server's tokens are
those of the model. If not, a ConfigError says how to fix it.

Takes: requests. Gives: the samples of the server. Never: sends tokens to a server with another
tokenizer than the model's, renders a prompt as text for a model in training, or manages a KV cache:
sessions use the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rollart_core.contracts.inference import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    TextAnswer,
    WeightSwap,
)
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    InferenceFailure,
    did_you_mean,
)
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.types import FunctionCall, TokenSpan, ToolCall
from rollart_plugins.engines.config import OpenAIConfig, ServerConfig
from rollart_plugins.engines.endpoint import EndpointClient, EndpointServer, key_from

UNTRUNCATED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent in every token request. Otherwise vLLM uses the values of the model's
``generation_config.json``."""
_ABORTED = frozenset({"abort", "cancelled", "error"})
_LARGEST_SEED = 2**31 - 1
"""Not every server accepts more than 31 bits."""


def token_body(model: str, request: GenerateRequest, config: OpenAIConfig) -> dict[str, Any]:
    """Return the body of ``/completions`` for a prompt of token ids."""
    return {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        **UNTRUNCATED,
        "seed": request.sampling_key & _LARGEST_SEED,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": False,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **config.extra,
    }


def text_body(model: str, request: GenerateRequest, config: OpenAIConfig) -> dict[str, Any]:
    """Return the body of ``/chat/completions``."""
    body = {
        "model": model,
        "messages": [dict(message) for message in request.messages or ()],
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "seed": request.sampling_key & _LARGEST_SEED,
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    for name in config.omit:
        del body[name]
    if "max_tokens" in body:
        body[config.max_tokens_field] = body.pop("max_tokens")
    return body | config.extra


def token_answer(
    answer: Mapping[str, Any], request: GenerateRequest, policy_version: int
) -> GenerateResult:
    """Return the tokens of an answer, each with its logprob.

    Raises:
        EndpointError: If the answer has no tokens or too few logprobs, or is for another prompt.
    """
    choice = _choice(answer)
    read = choice.get("prompt_token_ids")
    if isinstance(read, list) and read != list(request.token_ids):
        raise malformed(
            f"an answer to another prompt: {len(request.token_ids)} tokens were sent, and it "
            f"read {len(read)}"
        )
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise malformed("no logprobs")
    token_ids = _token_ids(choice, logprobs)
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(token_ids):
        num = len(values) if isinstance(values, list) else 0
        raise malformed(f"{num} logprobs for {len(token_ids)} tokens")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise malformed("a logprob that is not a finite number")
    spans = (TokenSpan(0, len(token_ids), policy_version),) if token_ids else ()
    return GenerateResult(
        token_ids, [float(v) for v in values], spans, _finish(choice), _num_cached(answer)
    )


def text_answer(answer: Mapping[str, Any]) -> GenerateResult:
    """Return the text of an answer.

    Raises:
        EndpointError: If the answer contains no text.
    """
    choice = _choice(answer)
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise malformed("a choice without a message")
    usage = answer.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    said = TextAnswer(
        content_of(message),
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        _tool_calls(message),
        _reasoning(message),
    )
    return GenerateResult([], [], (), _finish(choice), _num_cached(answer), text=said)


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message: a string, nothing (only reasoning), or a list of parts.

    Raises:
        EndpointError: If the content has another type.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text", "") for part in content if part.get("type") == "text"]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise malformed(f"a message whose content is a {type(content).__name__}")


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the thought, which servers return under one of two names."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Return the tool calls; the arguments are exactly the text of the model."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise malformed("tool_calls that are not a list")
    return tuple(_tool_call(call, index) for index, call in enumerate(calls))


def _tool_call(call: object, index: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise malformed("a tool call without a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise malformed("a tool call without a name")
    if not isinstance(arguments, str | None):  # some servers send the object
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = FunctionCall(name=name, arguments=arguments or "{}")
    return ToolCall(id=str(call.get("id") or f"call{index}"), type="function", function=called)


def malformed(what: str) -> EndpointError:
    """Return the error for an answer that lacks required data."""
    return EndpointError(f"the server answered {what}", kind="malformed")


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise malformed("no choice")
    return choices[0]


def _token_ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> list[int]:
    found = choice.get("token_ids")
    if found is None:
        found = _named(logprobs.get("tokens"))
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        error = malformed(
            "no token ids (vLLM returns them); for a server without them, use model: {kind: remote}"
        )
        error.kind = "refused"
        raise error
    return found


def _named(names: object) -> list[int] | None:
    """Return the ids of tokens in the form ``token_id:<n>``; None if one is not."""
    start = "token_id:"
    if not isinstance(names, list):
        return None
    ids = [n.removeprefix(start) for n in names if isinstance(n, str) and n.startswith(start)]
    if len(ids) != len(names) or not all(i.isdecimal() for i in ids):
        return None
    return [int(i) for i in ids]


def _finish(choice: Mapping[str, Any]) -> FinishReason:
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise EndpointError("the server withheld the answer (content_filter)", kind="refused")
    if reason == "length":
        return "length"
    return "abort" if reason in _ABORTED else "stop"


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _num_cached(answer: Mapping[str, Any]) -> int:
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return _count(details, "cached_tokens") if isinstance(details, Mapping) else 0


_TRY_ANEW = frozenset({"unreachable", "slow", "rate", "server", "malformed"})
"""Kinds of errors after which another attempt of the episode can succeed."""

_START_RETRIES = 1
NUM_SPREAD_TOKENS = 512
"""Number of tokens, spread over the vocabulary, in one of the texts that are compared."""
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\tand a tab\n\n\nthree lines, 0123456789 1,234.56 10^9",
    "def f(x: int) -> str:\n    return f'{x!r}' if x else \"\"  # done",
    "Grüße aus Köln, là-bas; Привет мир, 你好世界, こんにちは, שלום, مرحبا, 👩‍💻🎉",
    "'s 're 'll DON'T camelCase snake_case SCREAMING_CASE http://a.b/c?d=e&f=%20",
)


class OpenAIEngine(InferenceEngine):
    """Engine that uses an OpenAI-compatible server; see the module.

    Args:
        config: Options of the engine.
        model_path: Path of the served model's tokenizer. Empty: the tokenizer is unknown, and
            requests are text.
        channel: Rejected, because new weights cannot be sent to the server.
        deterministic: Rejected.
        max_context_tokens: Maximum length of prompt and answer together, at most the server's.
        policy_version: Version of the served weights.
        options: The fields of ``config`` as keyword arguments, as the registry passes them. Options
            for engines that hold the model are ignored.

    Raises:
        ConfigError: If the server does not support what the run requires.
    """

    follows_training: ClassVar[bool] = False

    def __init__(
        self,
        config: OpenAIConfig | None = None,
        *,
        model_path: str,
        channel: WeightChannel | None = None,
        deterministic: bool = False,
        max_context_tokens: int = 2048,
        policy_version: int = 0,
        **options: object,
    ) -> None:
        for name in ("dtype", "device", "kv_on_swap"):
            options.pop(name, None)
        self._config = config or OpenAIConfig.model_validate(options)
        self._model_path, self._max_context_tokens = model_path, max_context_tokens
        self._version = policy_version
        if channel is not None and not self.follows_training:
            channel.close()
            raise ConfigError(
                "engine: openai cannot follow training, because its server keeps its initial "
                "weights; use it with `rollart eval`, or train with another engine"
            )
        if deterministic:
            raise ConfigError("deterministic: a server cannot guarantee it; remove it")
        self._client = EndpointClient(self._server())
        self._served: Served | None = None
        self._tasks: dict[str, asyncio.Task[GenerateResult]] = {}
        self._open: asyncio.Event | None = None
        self._num_running = self._prompt_tokens = self._cached_tokens = self._new_tokens = 0

    async def start(self) -> None:
        """Find the model on the server, and compare its tokens with the tokenizer's.

        Raises:
            ConfigError: If the model is not on the server, or has another tokenizer.
        """
        self._open = asyncio.Event()
        self._open.set()
        found = await served(self._client, self._config.model)
        if self._model_path:
            self._check_length(found)
            from rollart_core.models.tokenizer import load_tokenizer

            tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path)
            await check_tokens(self._client, found.name, tokenizer)
        self._served = found

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See :meth:`InferenceEngine.generate`.

        Raises:
            ContextOverflow: If the conversation is too long for the server's model.
            InferenceFailure: For any other error of the server or the connection.
        """
        found = self._ready()
        if request.request_id in self._tasks:
            raise InferenceFailure(f"request id {request.request_id!r} is already in flight")
        work = self._ask_text if not self._model_path else self._ask_tokens
        task = asyncio.ensure_future(work(found.name, request))
        self._tasks[request.request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                task.cancel()
                raise
            return GenerateResult([], [], (), "abort")
        except EndpointError as e:
            raise self._failure(e) from e
        finally:
            self._tasks.pop(request.request_id, None)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Raise an error: the engine cannot load weights."""
        raise InferenceFailure("engine: openai cannot load weights", boundary="load_weights")

    async def pause(self) -> None:
        """Send no more requests; the server finishes those that it has begun."""
        if self._open is not None:
            self._open.clear()

    async def resume(self) -> None:
        """Continue after ``pause``."""
        if self._open is not None:
            self._open.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Disconnect these requests; unknown ids are ignored."""
        for request_id in request_ids:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()

    async def release(self, session_id: str) -> None:
        """Do nothing: the server manages its own cache."""

    async def stats(self) -> EngineStats:
        """Return counters and gauges, with the server's token counts."""
        return EngineStats(
            policy_version=self._version,
            num_running=self._num_running,
            num_waiting=len(self._tasks) - self._num_running,
            prefill_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            decode_tokens=self._new_tokens,
            extra={"retried": float(self._client.num_retried)},
        )

    async def close(self) -> None:
        """Disconnect all requests and close the client."""
        self._served = None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        with suppress(Exception):
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _ready(self) -> Served:
        if self._served is None:
            raise InferenceFailure("the engine is not running", boundary="engine.generate")
        return self._served

    def _check_length(self, found: Served) -> None:
        length = found.max_context_tokens
        if length is not None and self._max_context_tokens > length:
            raise ConfigError(
                f"rollout.max_context_tokens: {self._max_context_tokens} is greater than "
                f"{length}, the maximum of {found.name!r} on the server"
            )

    async def _ask_tokens(self, model: str, request: GenerateRequest) -> GenerateResult:
        answer = await self._post("completions", token_body(model, request, self._config))
        result = token_answer(answer, request, self._version)
        self._count(len(request.token_ids), result, len(result.token_ids))
        return result

    async def _ask_text(self, model: str, request: GenerateRequest) -> GenerateResult:
        answer = await self._post("chat/completions", text_body(model, request, self._config))
        result = text_answer(answer)
        assert result.text is not None
        self._count(result.text.num_prompt_tokens, result, result.text.num_new_tokens)
        return result

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        assert self._open is not None
        await self._open.wait()
        self._num_running += 1
        try:
            return await self._client.post(path, body)
        finally:
            self._num_running -= 1

    def _count(self, num_prompt: int, result: GenerateResult, num_new: int) -> None:
        self._cached_tokens += result.num_cached_tokens
        self._prompt_tokens += max(0, num_prompt - result.num_cached_tokens)
        self._new_tokens += num_new

    def _failure(self, error: EndpointError) -> InferenceFailure:
        """Return the error of the episode for an error of the server."""
        if error.kind == "overflow":
            return ContextOverflow(str(error), boundary="generate")
        failure = InferenceFailure(str(error), boundary="generate")
        failure.retryable = error.kind in _TRY_ANEW
        return failure

    def _server(self) -> EndpointServer:
        return server_of(self._config)


def server_of(config: ServerConfig) -> EndpointServer:
    """Return the server in a config, with the key from the environment."""
    return EndpointServer(
        base_url=config.base_url,
        api_key=key_from(config.api_key_env),
        headers=config.headers,
        answer_s=config.answer_s,
        num_retries=config.num_retries,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """One model of a server."""

    name: str
    max_context_tokens: int | None
    """None: the server does not provide it."""


async def served(client: EndpointClient, wanted: str | None) -> Served:
    """Return the model to request from a server.

    Args:
        client: Client of the server.
        wanted: Name of the model. None: the only model of the server.

    Raises:
        ConfigError: If the server is not reachable, the key is invalid, the model does not exist,
            or the server has several models and none is named.
    """
    try:
        answer = await client.get("models", num_retries=_START_RETRIES)
    except EndpointError as e:
        if e.kind == "missing" and wanted is not None:
            return Served(wanted, None)  # not every server has /models
        raise ConfigError(start_fault(e)) from e
    rows = answer.get("data") if isinstance(answer, Mapping) else None
    found = {
        r["id"]: r for r in rows or () if isinstance(r, Mapping) and isinstance(r.get("id"), str)
    }
    if wanted is None and len(found) == 1:
        wanted = next(iter(found))
    if wanted is None:
        raise ConfigError(f"engine.model: select one of the server's models: {_names(found)}")
    if wanted not in found and found:
        near = did_you_mean(wanted, list(found))
        raise ConfigError(
            f"engine.model: the server has no {wanted!r}.{near} It has {_names(found)}"
        )
    length = found.get(wanted, {}).get("max_model_len")
    return Served(wanted, length if isinstance(length, int) and length > 0 else None)


def start_fault(error: EndpointError) -> str:
    """Return the message for a server that cannot be used, and how to fix it."""
    mend = {
        "unreachable": "start the server, or correct engine.base_url",
        "slow": "check that the server is responsive, or correct engine.base_url",
        "key": "set its key as OPENAI_API_KEY in the environment, or set engine.api_key_env to the "
        "name of its variable",
        "missing": "correct engine.base_url (it usually ends with /v1), or set engine.model",
    }.get(error.kind)
    return f"engine: {error}" + (f": {mend}" if mend else "")


async def check_tokens(client: EndpointClient, model: str, tokenizer: ChatTokenizer) -> None:
    """Check that the server's tokens are those of the local tokenizer.

    The server encodes texts that cover writing systems, code, white space, the special tokens and
    tokens from the whole vocabulary. The ids must be equal to the local ones.

    Raises:
        ConfigError: If ids differ, or the server cannot encode text.
    """
    for text in probe_texts(tokenizer):
        theirs, ours = await _encoded(client, model, text), tokenizer.encode(text)
        if theirs == ours:
            continue
        at = next(
            (n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b),
            min(len(theirs), len(ours)),
        )
        raise ConfigError(
            f"engine: {model!r} at {client.server.base_url} has other tokens than model.path: of "
            f"{text[:40]!r} it makes {len(theirs)}, the tokenizer here {len(ours)}, and they part "
            f"at number {at}; give the model.path of the model that is served"
        )


def probe_texts(tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield the texts for which two tokenizers must agree."""
    yield from _TEXTS
    stops = "".join(tokenizer.decode([i]) for i in tokenizer.stop_token_ids)
    yield f"before{stops}after {stops}"
    step = max(1, tokenizer.vocab_size // NUM_SPREAD_TOKENS)
    spread = range(0, tokenizer.vocab_size, step)
    yield " ".join(tokenizer.decode([i], skip_special_tokens=True) for i in spread)


async def _encoded(client: EndpointClient, model: str, text: str) -> list[int]:
    """Return the server's tokens of a text, from ``/tokenize`` or from a returned prompt."""
    body: dict[str, Any] = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        try:
            found = (await client.post("/tokenize", body)).get("tokens")
        except EndpointError as e:
            if e.kind not in ("missing", "refused"):
                raise
            body |= {"max_tokens": 1, "return_token_ids": True}
            choices = (await client.post("completions", body)).get("choices")
            first = choices[0] if isinstance(choices, list) and choices else None
            found = first.get("prompt_token_ids") if isinstance(first, Mapping) else None
    except EndpointError as e:
        raise ConfigError(start_fault(e)) from e
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise ConfigError(
            f"engine: {client.server.base_url} does not return token ids (vLLM does); for a "
            f"server with text only, use model: {{kind: remote}}"
        )
    return found


def _names(found: Mapping[str, Any]) -> str:
    names = sorted(found)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) + more) or "none"
