"""``/v1/chat/completions`` and ``/v1/completions``: requests read, answers written.

Takes: a parsed body, or an answer. Gives: messages, or a prompt of text or tokens without the chat
template; JSON objects. Never: asks an engine or keeps anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.gateway.body import Body, SamplingRequest, flag, sampling_request, text
from rollart_core.gateway.errors import bad_field, unsupported
from rollart_core.gateway.shape import Said, token_texts
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's API says where a request says nothing."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for the next message of a conversation."""

    messages: list[Message]
    tools: list[ToolSpec]
    sampling_request: SamplingRequest


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
    logprobs = flag(body, "logprobs")
    wanted = sampling_request(body, "max_completion_tokens", "max_tokens", logprobs=logprobs)
    tools, choice = tool_specs(body.get("tools")), body.get("tool_choice")
    if choice not in (None, "auto") and tools:
        wanted = replace(wanted, ignored=(*wanted.ignored, "tool_choice"))
    return ChatRequest(
        [_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools,
        wanted,
    )


def chat_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the answer as one object."""
    message: dict[str, Any] = {**said.message, "refusal": None}
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    choice = {"index": 0, "message": message, **_ending(said, tokenizer)}
    if said.sampling_request.token_ids:
        choice["token_ids"] = said.result.token_ids
    return {**said.head("chat.completion"), "choices": [choice], "usage": said.usage()}


def chat_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the answer as the chunks of a stream."""
    head = said.head("chat.completion.chunk")
    if said.sampling_request.include_usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
        return {**head, "choices": [choice]}

    ending = _ending(said, tokenizer)
    yield chunk({"role": "assistant", "content": ""})
    if said.message["content"] or ending["logprobs"] or said.sampling_request.token_ids:
        more = {"token_ids": said.result.token_ids} if said.sampling_request.token_ids else {}
        yield chunk({"content": said.message["content"]}, logprobs=ending["logprobs"], **more)
    for index, call in enumerate(said.message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish_reason=ending["finish_reason"])
    if said.sampling_request.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def tool_specs(tools: object) -> list[ToolSpec]:
    """Read the tools of a request.

    Raises:
        RequestError: When they are none.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_field("tools", "must be a list")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: object, name: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(f"{name}.type", "tools are of type 'function'")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(f"{name}.function", "must be an object with a name")
    if not isinstance(function.get("parameters", {}), dict):
        raise bad_field(f"{name}.function.parameters", "must be a JSON schema")
    spec = FunctionSpec(name=function["name"])
    if isinstance(function.get("description"), str):
        spec["description"] = function["description"]
    if "parameters" in function:
        spec["parameters"] = function["parameters"]
    return ToolSpec(type="function", function=spec)


def _message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise bad_field(name, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_ROLES)}, not {role!r}")
    content = message.get("content")
    if not isinstance(content, str):
        content = text(content, f"{name}.content")
    read = Message(role=_ROLES[role], content=content)
    if role == "user":
        return read
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            read["tool_calls"] = _calls(calls, f"{name}.tool_calls")
        if isinstance(message.get("reasoning_content"), str):
            read["reasoning_content"] = message["reasoning_content"]
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise bad_field(f"{name}.tool_call_id", "must name the call that is answered")
        read["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            read["name"] = message["name"]
    return read


def _calls(calls: object, name: str) -> list[ToolCall]:
    if not isinstance(calls, list):
        raise bad_field(name, "must be a list")
    return [_call(call, f"{name}[{i}]") for i, call in enumerate(calls)]


def _call(call: object, name: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise bad_field(name, "must be an object with a function")
    fields = (call.get("id"), function.get("name"), function.get("arguments"))
    if not all(isinstance(field, str) for field in fields):
        raise bad_field(name, "must have an id, and a function with name and arguments as text")
    called = FunctionCall(name=function["name"], arguments=function["arguments"])
    return ToolCall(id=call["id"], type="function", function=called)


def _ending(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    logprobs = None
    if said.sampling_request.logprobs:
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


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request to go on with a text."""

    prompt: str | list[int]
    sampling_request: SamplingRequest


def text_request(body: Body, vocab_size: int) -> TextRequest:
    """Read a request.

    Raises:
        RequestError: For a field that is wrong, or asks what cannot be kept.
    """
    if body.get("suffix"):
        raise unsupported("suffix", "answers only go on at the end")
    if flag(body, "echo"):
        raise unsupported("echo", "the prompt is not sent back")
    if (body.get("best_of") or 1) != 1:
        raise unsupported("best_of", "every answer is recorded; ask several times")
    wanted = sampling_request(body, "max_tokens", logprobs=_logprobs(body.get("logprobs")))
    if wanted.max_new_tokens is None:
        wanted = replace(wanted, max_new_tokens=DEFAULT_MAX_TOKENS)
    return TextRequest(_prompt(body.get("prompt"), vocab_size), wanted)


def text_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the answer as one object."""
    head = {**said.head("text_completion"), "usage": said.usage()}
    return {**head, "choices": [_choice(said, tokenizer)]}


def text_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the answer as the chunks of a stream."""
    head = said.head("text_completion")
    if said.sampling_request.include_usage:
        head["usage"] = None
    yield {**head, "choices": [_choice(said, tokenizer)]}
    if said.sampling_request.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def _choice(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    logprobs = None
    if said.sampling_request.logprobs:
        texts = token_texts(said.result, tokenizer)
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        logprobs = {
            "tokens": texts,
            "token_logprobs": said.result.inference_logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    choice = {
        "index": 0,
        "text": said.message["content"],
        "logprobs": logprobs,
        "finish_reason": said.finish_reason,
    }
    if said.sampling_request.token_ids:
        choice["prompt_token_ids"] = said.ask.token_ids
        choice["token_ids"] = said.result.token_ids
    return choice


def _prompt(prompt: object, vocab_size: int) -> str | list[int]:
    """Return the one prompt: text or tokens."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a text, or a list of tokens that is not empty")
    if any(isinstance(each, str | list) for each in prompt):
        raise unsupported("prompt", "only one prompt at a time; ask several times")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise bad_field("prompt", "tokens must be whole numbers")
    if not all(0 <= i < vocab_size for i in prompt):
        raise bad_field("prompt", f"tokens must be at least 0 and below {vocab_size}")
    return prompt


def _logprobs(value: object) -> bool:
    if value is None or value is False:
        return False
    if not isinstance(value, int) or not 0 <= value <= 1:
        raise unsupported("logprobs", "only 0 or 1: those of what was sampled are known")
    return True
