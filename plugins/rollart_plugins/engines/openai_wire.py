"""Requests and answers of the OpenAI-compatible protocol, with what vLLM adds to it.

Takes: a :class:`GenerateRequest`, or an answer as JSON. Gives: a body, or a
:class:`GenerateResult`. Never: guesses what is missing: an answer that does not hold what it must
is an :class:`EndpointError`.

vLLM's additions (its ``CompletionRequest``): ``return_token_ids`` (0.10.2 and newer) puts
``prompt_token_ids`` and ``token_ids`` into a choice; ``return_tokens_as_token_ids`` (older ones
too) writes the tokens of the logprobs as ``token_id:<n>``. A prompt may be a list of token ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rollart_core.contracts.inference import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TextAnswer,
)
from rollart_core.errors import EndpointError
from rollart_core.types import FunctionCall, TokenSpan, ToolCall
from rollart_plugins.engines.openai_config import OpenAIConfig

UNTRUNCATED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said in every token request: else vLLM takes what the model's ``generation_config.json`` says."""
_ABORTED = frozenset({"abort", "cancelled", "error"})
_LARGEST_SEED = 2**31 - 1
"""Not every server takes more than 31 bits."""


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
    for name in config.omit:
        del body[name]
    if "max_tokens" in body:
        body[config.max_tokens_field] = body.pop("max_tokens")
    return body | config.extra


def token_answer(
    answer: Mapping[str, Any], request: GenerateRequest, policy_version: int
) -> GenerateResult:
    """Return the tokens of an answer, every one with its logprob.

    Raises:
        EndpointError: When it holds none, too few, or read another prompt.
    """
    choice = _choice(answer)
    read = choice.get("prompt_token_ids")
    if isinstance(read, list) and read != list(request.token_ids):
        raise malformed(
            f"it was given a prompt of {len(request.token_ids)} tokens and read {len(read)} others"
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
        raise malformed("a logprob that is no number")
    spans = (TokenSpan(0, len(token_ids), policy_version),) if token_ids else ()
    return GenerateResult(
        token_ids, [float(v) for v in values], spans, _finish(choice), _num_cached(answer)
    )


def text_answer(answer: Mapping[str, Any]) -> GenerateResult:
    """Return the text of an answer.

    Raises:
        EndpointError: When it holds none.
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
    )
    return GenerateResult([], [], (), _finish(choice), _num_cached(answer), text=said)


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message: a string, nothing (a model that only thought), or parts.

    Raises:
        EndpointError: When it is none of them.
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


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Return the calls; their arguments are whatever the model wrote."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise malformed("tool_calls that are no list")
    return tuple(_tool_call(call, index) for index, call in enumerate(calls))


def _tool_call(call: object, index: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise malformed("a tool call without a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise malformed("a tool call without a name")
    if not isinstance(arguments, str | None):  # some servers give the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = FunctionCall(name=name, arguments=arguments or "{}")
    return ToolCall(id=str(call.get("id") or f"call{index}"), type="function", function=called)


def malformed(what: str) -> EndpointError:
    """Return the error of an answer that does not hold what it must."""
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
            "no token ids (vLLM gives them); a server that has none is model: {kind: remote}"
        )
        error.kind = "refused"
        raise error
    return found


def _named(names: object) -> list[int] | None:
    """Return the ids in tokens that are written ``token_id:<n>``; None when one is not."""
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
