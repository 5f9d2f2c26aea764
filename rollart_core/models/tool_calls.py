"""Tool calls of the policy, in the format of OpenAI's chat API.

Takes: the text of one message, and the model's tool format. Gives: reasoning, content, calls with
ids, and the invalid calls; and the format of a chat template. Never: contains the syntax of a
model family, which is a plugin (:class:`~rollart_core.contracts.tool_format.ToolFormat`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rollart_core.contracts.tool_format import BadToolCall, ParsedMessage, ToolFormat, tool_call
from rollart_core.models.chat_template import ChatTemplate, TemplateRefusal
from rollart_core.plugins import registry
from rollart_core.types import Message, ToolCall, ToolSpec

UNREADABLE = "unreadable"
"""The name of an invalid call."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PROBE: Final[dict[str, Any]] = {
    "text": 'a "b" <c> [d]\n{é漢}',
    "code": "007",
    "count": 3,
    "deep": {"list": [1, "two", 0.5], "yes": True},
}
"""Arguments that show how a template writes each type."""
_TYPES = {str: "string", int: "integer", dict: "object"}
_PROBE_TOOL = ToolSpec(
    type="function",
    function={
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": _TYPES[type(v)]} for name, v in _PROBE.items()},
        },
    },
)


def detect_tool_format(
    template: ChatTemplate, stop_texts: Sequence[str], has_token: Callable[[str], bool]
) -> ToolFormat | None:
    """Return the format whose parser reads a call that the template renders. None if none does.

    A template that shows tools but omits calls has the format whose marks are tokens of the model.
    The template then gets calls as text of that format.

    Args:
        template: The model's chat template.
        stop_texts: The tokens that end a message of the policy.
        has_token: Whether a text is one token of the tokenizer.
    """
    try:
        written = _written(template, stop_texts)
    except TemplateRefusal:
        return None
    formats = list(_formats())
    for each in formats:
        parsed = each.parse(written, [_PROBE_TOOL])
        found = [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.calls
        ]
        if json.dumps(found, sort_keys=True) == _WANTED and not parsed.errors:
            return each
    if "probe_tool" in written or not template.shows_tools:
        return None
    known = [each for each in formats if each.marks and all(map(has_token, each.marks))]
    if len(known) != 1:
        return None
    template.write_calls = known[0].render
    return known[0]


_WANTED = json.dumps([("probe_tool", _PROBE)], sort_keys=True)


def _formats() -> Iterator[ToolFormat]:
    for registered in registry.others_first("tool_formats"):
        yield registry.build("tool_formats", registered.key)


def _written(template: ChatTemplate, stop_texts: Sequence[str]) -> str:
    """Return the text of a message with a call, as the template renders it."""
    asked = Message(role="user", content="?")
    call = tool_call("probe_tool", json.dumps(_PROBE))
    call["id"] = call_id(0, 0)
    called = Message(role="assistant", content="", tool_calls=[call])
    whole = template.render([asked, called], tools=[_PROBE_TOOL])
    for opens in (True, False):  # some templates begin a thought in the prompt only
        prompt = template.render([asked], opens, [_PROBE_TOOL])
        if whole.startswith(prompt):
            whole = whole[len(prompt) :]
            break
    end = max(whole.rfind(stop) for stop in stop_texts)
    return whole[:end] if end >= 0 else whole


def parse_message(
    text: str,
    tool_format: ToolFormat,
    *,
    turn: int = 0,
    tools: Sequence[ToolSpec] = (),
    prompt: str = "",
) -> ParsedMessage:
    """Parse one message of the policy.

    Args:
        text: The policy's text, with all tokens except the one that ended it.
        tool_format: The format of the model.
        turn: Index of the message in the conversation. Ids are unique over turns.
        tools: The tools that the policy may call.
        prompt: The rendered prompt. It may end with the start of the reasoning.
    """
    thought = tool_format.thought
    opened = thought if thought and prompt.rstrip().endswith(thought) else ""
    parsed = tool_format.parse(opened + text, tools)
    calls = [ToolCall({**call, "id": call_id(turn, i)}) for i, call in enumerate(parsed.calls)]
    return ParsedMessage(parsed.content, parsed.reasoning, tuple(calls), parsed.errors)


def checked_calls(content: str, calls: Sequence[ToolCall]) -> ParsedMessage:
    """Return calls that a server parsed. Arguments that are not a JSON object become errors."""
    good, errors = [], []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            tool_call(name, arguments)
            good.append(call)
        except ValueError as e:
            errors.append(BadToolCall(arguments, str(e)))
    return ParsedMessage(content, "", tuple(good), tuple(errors))


def call_id(turn: int, index: int) -> str:
    """Return the id of a call: nine letters and digits, identical in every run."""
    number, digits = turn * 1296 + index, ""
    while number or len(digits) < 5:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return f"call{digits}"


def as_called(parsed: ParsedMessage, turn: int) -> Message | None:
    """Return the policy's message with its calls. None if it has none.

    The invalid calls follow the valid ones, with the policy's text as the argument. Each needs a
    call because its answer is an error message.
    """
    bad = []
    for index, error in enumerate(parsed.errors, len(parsed.calls)):
        text = json.dumps({"text": error.text}, ensure_ascii=False)
        bad.append(ToolCall({**tool_call(UNREADABLE, text), "id": call_id(turn, index)}))
    calls = [*parsed.calls, *bad]
    if not calls:
        return None
    message = Message(role="assistant", content=parsed.content, tool_calls=calls)
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    return message
