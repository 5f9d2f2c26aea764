"""``/v1/responses``: OpenAI's newer API, as far as it says the same as chat completions.

Takes: a parsed body, or an answer. Gives: messages and wishes, or JSON objects. Never: asks an
engine or keeps anything; what ``previous_response_id`` stands for is given to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.gateway.body import Body, SamplingRequest, sampling_request, text
from rollart_core.gateway.completions import tool_specs
from rollart_core.gateway.errors import RequestError, bad_field, unsupported
from rollart_core.gateway.shape import Said
from rollart_core.types import FunctionCall, Message, ToolCall, ToolSpec

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One request for a response."""

    messages: list[Message]
    """With the instructions."""
    talk: list[Message]
    """Without them: what a later request goes on from."""
    tools: list[ToolSpec]
    sampling_request: SamplingRequest
    body: Body


def response_request(body: Body, earlier: Mapping[str, Sequence[Message]]) -> ResponseRequest:
    """Read a request.

    Args:
        body: The request.
        earlier: What was said up to each earlier response of the episode, by its id.

    Raises:
        RequestError: For a field that is wrong, or asks what cannot be kept.
    """
    options = body.get("text") or {}
    if not isinstance(options, dict):
        raise bad_field("text", "must be an object")
    form = options.get("format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise unsupported("text.format", "answers are not held to a format; ask for 'text'")
    if body.get("background"):
        raise unsupported("background", "answers are waited for")
    talk: list[Message] = []
    previous = body.get("previous_response_id")
    if previous is not None:
        if not isinstance(previous, str) or previous not in earlier:
            message = f"there is no response {previous!r} of this episode"
            raise RequestError(message, status=404, param="previous_response_id")
        talk += earlier[previous]
    talk += _items(body.get("input"))
    instructions = text(body.get("instructions"), "instructions")
    first = [Message(role="system", content=instructions)] if instructions else []
    tools, choice = tool_specs(_flat_tools(body.get("tools"))), body.get("tool_choice")
    wanted = sampling_request({**body, "stop": None}, "max_output_tokens")
    if choice not in (None, "auto") and tools:
        wanted = replace(wanted, ignored=(*wanted.ignored, "tool_choice"))
    return ResponseRequest([*first, *talk], talk, tools, wanted, body)


def response(asked: ResponseRequest, said: Said) -> dict[str, Any]:
    """Return the answer as one object."""
    cut = said.finish_reason == "length"
    usage, body = said.usage(), asked.body
    head = said.head("response")
    created = head.pop("created")
    return {
        **head,
        "id": response_id(said),
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "output": _output(said),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(asked: ResponseRequest, said: Said) -> Iterator[dict[str, Any]]:
    """Return the answer as the events of a stream."""
    whole = response(asked, said)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        events += _item_events(index, item)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    yield from ({**event, "sequence_number": i} for i, event in enumerate(events))


def response_id(said: Said) -> str:
    """Return the id by which a later request goes on from this answer."""
    return f"resp_{said.answer.turn}"


def _item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    added = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        added["arguments"] = ""
        inner = [
            _event("function_call_arguments.delta", at, delta=item["arguments"]),
            _event("function_call_arguments.done", at, arguments=item["arguments"]),
        ]
    else:
        (part,) = item["content"]
        added["content"] = []
        at_part = {**at, "content_index": 0}
        inner = [
            _event("content_part.added", at_part, part={**part, "text": ""}),
            _event("output_text.delta", at_part, delta=part["text"], logprobs=[]),
            _event("output_text.done", at_part, text=part["text"], logprobs=[]),
            _event("content_part.done", at_part, part=part),
        ]
    outer = {"output_index": index}
    return [
        _event("output_item.added", outer, item=added),
        *inner,
        _event("output_item.done", outer, item=item),
    ]


def _event(kind: str, at: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **at, **more}


def _output(said: Said) -> list[dict[str, Any]]:
    message, turn = said.message, said.answer.turn
    calls = message.get("tool_calls", [])
    items: list[dict[str, Any]] = []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{turn}",
                "role": "assistant",
                "status": "incomplete" if said.finish_reason == "length" else "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{turn}_{index}",
                "call_id": call["id"],
                **call["function"],
                "status": "completed",
            }
        )
    return items


def _flat_tools(tools: object) -> object:
    """Return the tools in the shape of chat completions."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def _items(given: object) -> list[Message]:
    """Return the input as messages; calls belong to the message of the assistant before them."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    if not isinstance(given, list):
        raise bad_field("input", "must be a text, or a list of items")
    messages: list[Message] = []
    for index, item in enumerate(given):
        name = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad_field(name, "must be an object")
        kind = item.get("type", "message")
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(Message(role="assistant", content=""))
            messages[-1].setdefault("tool_calls", []).append(_call(item, name))
        elif kind != "reasoning":
            messages.append(_message(kind, item, name))
    if not messages:
        raise bad_field("input", "is empty")
    return messages


def _message(kind: object, item: Body, name: str) -> Message:
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise bad_field(f"{name}.call_id", "must name the call that is answered")
        output = text(item.get("output"), f"{name}.output")
        return Message(role="tool", content=output, tool_call_id=item["call_id"])
    if kind != "message":
        raise unsupported(f"{name}.type", f"{kind!r} is not known here")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_ROLES)}, not {role!r}")
    return Message(role=_ROLES[role], content=text(item.get("content"), f"{name}.content"))


def _call(item: Body, name: str) -> ToolCall:
    fields = (item.get("call_id"), item.get("name"), item.get("arguments"))
    if not all(isinstance(field, str) for field in fields):
        raise bad_field(name, "must have call_id, name and arguments as text")
    called = FunctionCall(name=item["name"], arguments=item["arguments"])
    return ToolCall(id=item["call_id"], type="function", function=called)
