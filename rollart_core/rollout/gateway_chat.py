"""``/v1/chat/completions``: requests read, answers written.

Takes: a parsed body, or an answer. Gives: messages and wishes, or JSON objects. Never: asks an
engine or keeps anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.gateway_body import Body, Wishes, flag, text, wishes
from rollart_core.rollout.gateway_errors import bad_field, unsupported
from rollart_core.rollout.gateway_shape import Said, token_texts
from rollart_core.types import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for the next message of a conversation."""

    messages: list[Message]
    wishes: Wishes


def chat_request(body: Body) -> ChatRequest:
    """Read a request.

    Raises:
        RequestError: For a field that is wrong, or asks what cannot be kept.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be a list of at least one message")
    if body.get("top_logprobs"):
        raise unsupported("top_logprobs", "only the logprobs of what was sampled are known")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise unsupported("response_format", "answers are not held to a format; ask for 'text'")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "answers are text")
    wanted = wishes(body, "max_completion_tokens", "max_tokens")
    return ChatRequest(
        [_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        replace(wanted, logprobs=flag(body, "logprobs")),
    )


def chat_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the answer as one object."""
    message: dict[str, Any] = {**said.message, "refusal": None}
    choice = {"index": 0, "message": message, **_ending(said, tokenizer)}
    if said.wishes.token_ids:
        choice["token_ids"] = said.result.token_ids
    return {**said.head("chat.completion"), "choices": [choice], "usage": said.usage()}


def chat_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the answer as the chunks of a stream."""
    head = said.head("chat.completion.chunk")
    if said.wishes.include_usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
        return {**head, "choices": [choice]}

    ending = _ending(said, tokenizer)
    yield chunk({"role": "assistant", "content": ""})
    if said.message["content"] or ending["logprobs"]:
        more = {"token_ids": said.result.token_ids} if said.wishes.token_ids else {}
        yield chunk({"content": said.message["content"]}, logprobs=ending["logprobs"], **more)
    yield chunk({}, finish_reason=ending["finish_reason"])
    if said.wishes.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def _message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise bad_field(name, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_ROLES)}, not {role!r}")
    return Message(role=_ROLES[role], content=text(message.get("content"), f"{name}.content"))


def _ending(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    logprobs = None
    if said.wishes.logprobs:
        texts = token_texts(said.result, tokenizer)
        rows = zip(texts, said.result.inference_logprobs, strict=True)
        logprobs = {
            "content": [
                {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
                for t, p in rows
            ],
            "refusal": None,
        }
    return {"logprobs": logprobs, "finish_reason": said.finish_reason}
