"""Tool calls of the policy, in the format of OpenAI's chat API.

Takes: the text of one message, and the model's tool format. Gives: reasoning, content, calls with
ids, and the invalid calls; and the format of a chat template. Never: contains the syntax of a
model family, which is a plugin (:class:`~rollart_core.contracts.tool_format.ToolFormat`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from rollart_core.contracts.tool_format import BadToolCall, ParsedMessage, ToolFormat, tool_call
from rollart_core.models.chat_template import PROBE, PROBE_TOOL, ChatTemplate, TemplateRefusal
from rollart_core.plugins import registry
from rollart_core.types import Message, ToolCall, ToolSpec

UNREADABLE = "unreadable"
"""The name of an invalid call."""
_MOST_CALLS = 1296
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_VALUES: Final[dict[str, Any]] = {
    "text": 'a "b" <c> [d]\n{é漢}',
    "code": "007",
    "count": 3,
    "deep": {"list": [1, "two", 0.5], "yes": True},
}
"""Arguments that show how a template writes each type."""
_WANTED: Final = json.dumps([(PROBE, _VALUES)], sort_keys=True)


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
    plain = _written(template, stop_texts, call_id(0, 0))
    if plain is None or not (template.shows_tools or PROBE in plain):
        return None
    found = registry.others_first("tool_formats")
    formats: list[ToolFormat] = [registry.build("tool_formats", each.key) for each in found]
    for each in formats:
        own = each.call_id(PROBE, 0)
        parsed = each.parse((own and _written(template, stop_texts, own)) or plain, [PROBE_TOOL])
        calls = [call["function"] for call in parsed.calls]
        read = [(call["name"], json.loads(call["arguments"])) for call in calls]
        if json.dumps(read, sort_keys=True) == _WANTED and not parsed.errors:
            return each
    known = [each for each in formats if each.marks and all(map(has_token, each.marks))]
    if PROBE in plain or len(known) != 1:
        return None
    template.write_calls = known[0].render
    return known[0]


def _written(template: ChatTemplate, stop_texts: Sequence[str], given_id: str) -> str | None:
    """Return a message with a call as the template renders it. None if it refuses."""
    asked = Message(role="user", content="?")
    call = tool_call(PROBE, json.dumps(_VALUES))
    call["id"] = given_id
    called = Message(role="assistant", content="", tool_calls=[call])
    try:
        whole = template.render([asked, called], tools=[PROBE_TOOL])
        prompts = [template.render([asked], opens, [PROBE_TOOL]) for opens in (True, False)]
    except TemplateRefusal:
        return None
    # Some templates begin a thought in the prompt only.
    written = next((whole[len(p) :] for p in prompts if whole.startswith(p)), whole)
    end = max(written.rfind(stop) for stop in stop_texts)
    return written[:end] if end >= 0 else written


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
    calls = []
    for index, call in enumerate(parsed.calls):
        own = tool_format.call_id(call["function"]["name"], turn * _MOST_CALLS + index)
        calls.append(ToolCall({**call, "id": own or call_id(turn, index)}))
    return replace(parsed, calls=tuple(calls))


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
    number, digits = turn * _MOST_CALLS + index, ""
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
