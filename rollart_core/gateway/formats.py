"""The formats of OpenAI's API: parse requests and build responses.

    ``/v1/chat/completions``  messages and tools     --> one message, or chunks of it
    ``/v1/completions``       a text, or its tokens  --> text, without the chat template
    ``/v1/responses``         the newer API, as far as it is equivalent to chat completions

Takes: a parsed body, or a recorded answer. Gives: messages, tools and sampling parameters, or JSON
objects. Never: calls an engine or stores anything. The caller passes the messages of
``previous_response_id``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.contracts.inference import GenerateResult
from rollart_core.gateway.body import Body, SamplingRequest, flag, sampling_request, text
from rollart_core.gateway.errors import RequestError, bad_field, unsupported
from rollart_core.gateway.transcript import Answer, ModelCall
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec

_TALKERS = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES = {**_TALKERS, "tool": "tool"}

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, and its metadata."""

    ask: ModelCall
    answer: Answer
    sampling_request: SamplingRequest
    request_id: str
    model: str

    @property
    def message(self) -> Message:
        """The policy's message."""
        return self.answer.message

    @property
    def result(self) -> GenerateResult:
        """The sampled tokens."""
        return self.answer.result

    @property
    def finish_reason(self) -> str:
        """Why it ended, as in OpenAI's API."""
        if "tool_calls" in self.message:
            return "tool_calls"
        return "length" if self.result.finish_reason == "length" else "stop"

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields around the choices."""
        head: dict[str, Any] = {
            "id": self.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }
        if self.sampling_request.token_ids:
            head["prompt_token_ids"] = list(self.ask.token_ids)
        if self.sampling_request.ignored:
            head["rollart"] = {"ignored": list(self.sampling_request.ignored)}
        return head

    def usage(self) -> dict[str, Any]:
        """Return the token counts."""
        num_prompt, num_new = len(self.ask.token_ids), len(self.result.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": self.result.num_cached_tokens},
        }


def token_texts(result: GenerateResult, tokenizer: ChatTokenizer) -> list[str]:
    """Return each token as text. Parts of a character become U+FFFD."""
    return [tokenizer.decode([token]) for token in result.token_ids]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for the next message of a conversation."""

    messages: list[Message]
    tools: list[ToolSpec]
    sampling_request: SamplingRequest


def chat_request(body: Body) -> ChatRequest:
    """Parse a request.

    Raises:
        RequestError: If a field is invalid or not supported.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be a list of at least one message")
    if body.get("top_logprobs"):
        raise unsupported("top_logprobs", "only sampled tokens have logprobs")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise unsupported("response_format", "no format can be enforced; use 'text'")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "answers are text")
    logprobs = flag(body, "logprobs")
    wanted = sampling_request(body, "max_completion_tokens", "max_tokens", logprobs=logprobs)
    tools = tool_specs(body.get("tools"))
    return ChatRequest(
        [_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools,
        wanted,
    )


def chat_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the response as one object."""
    message: dict[str, Any] = {**said.message, "refusal": None}
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    choice = {"index": 0, "message": message, **_ending(said, tokenizer)}
    if said.sampling_request.token_ids:
        choice["token_ids"] = said.result.token_ids
    return {**said.head("chat.completion"), "choices": [choice], "usage": said.usage()}


def chat_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the response as the chunks of a stream."""
    head = said.head("chat.completion.chunk")
    if said.sampling_request.include_usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
        return {**head, "choices": [choice]}

    ending = _ending(said, tokenizer)
    yield chunk({"role": "assistant", "content": ""})
    if "reasoning_content" in said.message:
        yield chunk({"reasoning_content": said.message["reasoning_content"]})
    if said.message["content"] or ending["logprobs"] or said.sampling_request.token_ids:
        more = {"token_ids": said.result.token_ids} if said.sampling_request.token_ids else {}
        yield chunk({"content": said.message["content"]}, logprobs=ending["logprobs"], **more)
    for index, call in enumerate(said.message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish_reason=ending["finish_reason"])
    if said.sampling_request.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def tool_specs(tools: object) -> list[ToolSpec]:
    """Parse the tools of a request.

    Raises:
        RequestError: If they are not valid tools.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_field("tools", "must be a list")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: object, name: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(f"{name}.type", "tools must be of type 'function'")
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
        thought = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(thought, str) and thought:
            read["reasoning_content"] = thought
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise bad_field(f"{name}.tool_call_id", "must be the id of the answered call")
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
    """One request to continue a text."""

    prompt: str | list[int]
    sampling_request: SamplingRequest


def text_request(body: Body, vocab_size: int) -> TextRequest:
    """Parse a request.

    Raises:
        RequestError: If a field is invalid or not supported.
    """
    if body.get("suffix"):
        raise unsupported("suffix", "answers can only follow the prompt")
    if flag(body, "echo"):
        raise unsupported("echo", "the prompt cannot be returned")
    if (body.get("best_of") or 1) != 1:
        raise unsupported("best_of", "every answer is recorded; send several requests instead")
    wanted = sampling_request(body, "max_tokens", logprobs=_text_logprobs(body.get("logprobs")))
    if wanted.max_new_tokens is None:
        wanted = replace(wanted, max_new_tokens=DEFAULT_MAX_TOKENS)
    return TextRequest(_text_prompt(body.get("prompt"), vocab_size), wanted)


def text_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the response as one object."""
    head = {**said.head("text_completion"), "usage": said.usage()}
    return {**head, "choices": [_text_choice(said, tokenizer)]}


def text_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the response as the chunks of a stream."""
    head = said.head("text_completion")
    if said.sampling_request.include_usage:
        head["usage"] = None
    yield {**head, "choices": [_text_choice(said, tokenizer)]}
    if said.sampling_request.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def _text_choice(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
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
        choice["prompt_token_ids"] = list(said.ask.token_ids)
        choice["token_ids"] = said.result.token_ids
    return choice


def _text_prompt(prompt: object, vocab_size: int) -> str | list[int]:
    """Return the only prompt: text or tokens."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a text, or a non-empty list of tokens")
    if any(isinstance(each, str | list) for each in prompt):
        raise unsupported("prompt", "only one prompt per request; send several requests")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise bad_field("prompt", "tokens must be whole numbers")
    if not all(0 <= i < vocab_size for i in prompt):
        raise bad_field("prompt", f"tokens must be at least 0 and below {vocab_size}")
    return prompt


def _text_logprobs(value: object) -> bool:
    if value is None or value is False:
        return False
    if not isinstance(value, int) or not 0 <= value <= 1:
        raise unsupported("logprobs", "must be 0 or 1: only sampled tokens have logprobs")
    return True


@dataclass(frozen=True, slots=True)
class ResponseRequest(ChatRequest):
    """One request for a response."""

    talk: list[Message]
    """The messages without the instructions. A later request continues them."""
    body: Body


def response_request(body: Body, earlier: Mapping[str, Sequence[Message]]) -> ResponseRequest:
    """Parse a request.

    Args:
        body: The request.
        earlier: Response id -> the messages up to that earlier response of the episode.

    Raises:
        RequestError: If a field is invalid or not supported.
    """
    options = body.get("text") or {}
    if not isinstance(options, dict):
        raise bad_field("text", "must be an object")
    form = options.get("format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise unsupported("text.format", "no format can be enforced; use 'text'")
    if body.get("background"):
        raise unsupported("background", "background responses are not supported; set it to false")
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
    tools = tool_specs(_flat_tools(body.get("tools")))
    wanted = sampling_request({**body, "stop": None}, "max_output_tokens")
    return ResponseRequest([*first, *talk], tools, wanted, talk, body)


def response(asked: ResponseRequest, said: Said) -> dict[str, Any]:
    """Return the response as one object."""
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
    """Return the response as the events of a stream."""
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
    """Return the id with which a later request continues this response."""
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
        more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        inner = [
            _event("content_part.added", at_part, part={**part, "text": ""}),
            _event(f"{part['type']}.delta", at_part, delta=part["text"], **more),
            _event(f"{part['type']}.done", at_part, text=part["text"], **more),
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
    if thought := message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": parts})
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
    """Return the tools in the format of chat completions."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def _items(given: object) -> list[Message]:
    """Return the input as messages. Calls belong to the assistant's message before them."""
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
            messages[-1].setdefault("tool_calls", []).append(_item_call(item, name))
        elif kind != "reasoning":
            messages.append(_item_message(kind, item, name))
    if not messages:
        raise bad_field("input", "is empty")
    return messages


def _item_message(kind: object, item: Body, name: str) -> Message:
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise bad_field(f"{name}.call_id", "must be the id of the answered call")
        output = text(item.get("output"), f"{name}.output")
        return Message(role="tool", content=output, tool_call_id=item["call_id"])
    if kind != "message":
        raise unsupported(f"{name}.type", f"{kind!r} is not supported")
    role = item.get("role")
    if not isinstance(role, str) or role not in _TALKERS:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_TALKERS)}, not {role!r}")
    return Message(role=_TALKERS[role], content=text(item.get("content"), f"{name}.content"))


def _item_call(item: Body, name: str) -> ToolCall:
    fields = (item.get("call_id"), item.get("name"), item.get("arguments"))
    if not all(isinstance(field, str) for field in fields):
        raise bad_field(name, "must have call_id, name and arguments as text")
    called = FunctionCall(name=item["name"], arguments=item["arguments"])
    return ToolCall(id=item["call_id"], type="function", function=called)
