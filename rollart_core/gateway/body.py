"""Parsing of request bodies.

Takes: JSON as received. Gives: validated values. Never: repairs a value. An invalid field is
rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollart_core.gateway.errors import RequestError, bad_field, unsupported
from rollart_core.types import Message, ToolSpec

Body: TypeAlias = Mapping[str, Any]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
MAX_STOPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """The sampling parameters of a request, for all API formats."""

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """Whether to return token ids as well (vLLM's ``return_token_ids``)."""
    ignored: tuple[str, ...] = ()
    """Fields that change sampling in other servers, and are ignored here."""


def parse(raw: bytes) -> Body:
    """Return the JSON object of a body.

    Raises:
        RequestError: If it is not a JSON object, or contains a lone surrogate.
    """
    try:
        body = json.loads(raw.decode())  # from bytes, json would accept lone surrogates
        if b"\\ud" in raw or b"\\uD" in raw:  # an escape may be a lone surrogate
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON in UTF-8: {e}") from e
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def prompt_chars(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Return the number of characters of a request that the policy receives."""
    called = [calls for message in messages if (calls := message.get("tool_calls"))]
    shown = [json.dumps(part, ensure_ascii=False) for part in (called, tools) if part]
    return sum(len(message["content"]) for message in messages) + sum(map(len, shown))


def sampling_request(body: Body, *max_tokens: str, logprobs: bool = False) -> SamplingRequest:
    """Return the fields that are common to all API formats.

    Args:
        body: The body of the request.
        max_tokens: The names of the field with the maximum answer length.
        logprobs: Whether logprobs are requested. Each API format has its own field.
    """
    if (body.get("n") or 1) != 1:
        raise unsupported("n", "only one answer per request; send several requests")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_field("stream_options", "must be an object")
    return SamplingRequest(
        max_new_tokens=_max_tokens(body, max_tokens),
        stop=_stops(body.get("stop")),
        stream=flag(body, "stream"),
        include_usage=flag(options, "include_usage"),
        logprobs=logprobs,
        token_ids=flag(body, "return_token_ids"),
        ignored=_ignored(body),
    )


def flag(body: Body, name: str) -> bool:
    """Return a boolean field. The default is False."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_field(name, "must be true or false")
    return bool(value)


def text(value: object, name: str) -> str:
    """Return a text, or the joined texts of content parts.

    Raises:
        RequestError: If it is neither, or a part is not text.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_field(name, "must be text, or a list of text parts")
    return "".join(_part(part, f"{name}[{i}]") for i, part in enumerate(value))


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_field(name, "must be an object with a type")
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise unsupported(name, f"this model accepts only text, not {part['type']!r}")
    words = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(words, str):
        raise bad_field(name, "has no text")
    return words


def _max_tokens(body: Body, names: Sequence[str]) -> int | None:
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_field(name, f"must be a whole number above 0, not {value!r}")
        return value
    return None


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise bad_field("stop", "must be a text, or a list of non-empty texts")
    if len(stops) > MAX_STOPS:
        raise bad_field("stop", f"{len(stops)} given, at most {MAX_STOPS} are allowed")
    return tuple(stops)


def _ignored(body: Body) -> tuple[str, ...]:
    """Return the fields that have no effect: the episode has its own sampling parameters."""
    for name in ("temperature", "top_p", *_PENALTIES[:2]):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise bad_field(name, f"must be a number, not {value!r}")
    given = [name for name in _SAMPLING if body.get(name) is not None]
    given += [name for name in _PENALTIES if body.get(name)]
    forces_calls = body.get("tools") and body.get("tool_choice") not in (None, "auto")
    return (*given, "tool_choice") if forces_calls else tuple(given)
