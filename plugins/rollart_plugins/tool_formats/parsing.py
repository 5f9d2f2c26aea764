"""The common steps of all tool formats: reasoning, JSON calls, and errors.

Takes: the text of a message, or pieces of it. Gives: :class:`Found`, which collects the parsed
parts. Never: contains the marks of one family, or raises because of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart_core.contracts.tool_format import BadToolCall, ParsedMessage, strict_json, tool_call
from rollart_core.types import ToolCall

BARE_CALL = re.compile(r'\s*\{\s*"(name|type|parameters|function)"')
"""The start of a call."""
FAULTS = (ValueError, RecursionError)
"""What reading a value raises."""


@dataclass(slots=True)
class Found:
    """The parts of a message that are parsed so far."""

    shape: str
    """A call of the family on one line, for errors."""
    reasoning: str = ""
    said: list[str] = field(default_factory=list)
    """The pieces of text outside the calls."""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[BadToolCall] = field(default_factory=list)

    def fail(self, text: str, reason: str) -> None:
        """Add an invalid call."""
        line = " ".join(reason.split())
        self.errors.append(BadToolCall(text.strip(), f"{line}. Write {self.shape}"))

    def take(self, name: str, arguments: str, text: str) -> None:
        """Add a call with arguments in JSON. ``text`` is the whole call, for errors."""
        try:
            self.calls.append(tool_call(name, arguments))
        except ValueError as e:
            self.fail(text, str(e))

    def take_values(self, name: str, values: dict[str, Any], text: str) -> None:
        """Add a call with the values of its arguments."""
        try:
            arguments = dumps(values)
        except FAULTS as e:  # nested too deeply
            self.fail(text, f"the arguments of {name} are not valid: {e}")
            return
        self.take(name, arguments, text)

    def take_json(self, text: str, key: str) -> None:
        """Add a call that is a JSON object with a name and, at ``key``, arguments."""
        try:
            call = strict_json(text)
        except FAULTS as e:
            self.fail(text, f"the tool call is not valid JSON: {e}")
            return
        self.take_object(call, text, key)

    def take_object(self, call: object, text: str, key: str) -> None:
        """Add a call that is the value of a JSON object."""
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]  # the API format, which some policies repeat
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            self.fail(text, f'a tool call is a JSON object {{"name": ..., "{key}": {{...}}}}')
            return
        other = "arguments" if key == "parameters" else "parameters"
        arguments = call.get(key, call.get(other, {}))
        given = arguments if isinstance(arguments, str) else dumps(arguments)
        self.take(call["name"], given, text)

    def take_list(self, text: str) -> None:
        """Add the calls of a JSON list of objects with a name and arguments."""
        try:
            calls = strict_json(text)
        except FAULTS as e:
            self.fail(text, f"the tool calls are not valid JSON: {e}")
            return
        for call in calls if isinstance(calls, list) else [calls]:
            self.take_object(call, dumps(call), "arguments")

    def message(self) -> ParsedMessage:
        """Return the parsed message. Text around calls is stripped."""
        content = "".join(self.said)
        if self.calls or self.errors:
            content = content.strip()
        return ParsedMessage(content, self.reasoning, tuple(self.calls), tuple(self.errors))


def split_thought(
    text: str, opens: str, closes: str, is_in_call: Callable[[str, int], bool]
) -> tuple[str, str]:
    """Return the reasoning and the rest of a message.

    The text before the first closing mark is reasoning, also if it was opened in the prompt. A
    closing mark inside a call does not count, unless the text begins with the opening mark. A
    message with an unclosed opening mark is only reasoning.

    Args:
        text: The message.
        opens: The opening mark.
        closes: The closing mark.
        is_in_call: Whether a position of the text is inside a call.
    """
    thought, closed, said = text.partition(closes)
    start = thought.lstrip()
    opened = start.startswith(opens)
    if not (opened or closed) or (not opened and is_in_call(text, len(thought))):
        return "", text
    while start.startswith(opens):  # a policy may repeat the mark of the prompt
        start = start[len(opens) :].lstrip()
    return start.strip(), said.lstrip("\n")


def with_thought(reasoning: str, said: str) -> str:
    """Return the text of a message with reasoning in the most common marks."""
    return f"<think>\n{reasoning}\n</think>\n\n{said}" if reasoning else said


def json_end(text: str, start: int) -> int:
    """Return the end of the JSON value that begins at ``start`` or after white space.

    Raises:
        ValueError: If there is none.
        RecursionError: If it is nested too deeply.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    return json.JSONDecoder().raw_decode(text, start)[1]


def dumps(value: object) -> str:
    """Return the value as JSON, with Unicode as it is."""
    return json.dumps(value, ensure_ascii=False)


def function(call: ToolCall) -> tuple[str, str]:
    """Return the name and the arguments (JSON) of a call."""
    return call["function"]["name"], call["function"]["arguments"]


def json_list(calls: Sequence[ToolCall]) -> str:
    """Return calls as a JSON list."""
    objects = ('{{"name": "{}", "arguments": {}}}'.format(*function(call)) for call in calls)
    return f"[{', '.join(objects)}]"


def json_pieces(body: str) -> list[str]:
    """Return the JSON values of the body. The last piece is the text that is not one."""
    pieces, at = [], 0
    while at < len(body):
        try:
            end = json_end(body, at)
        except FAULTS:
            end = len(body)
        pieces.append(body[at:end])
        at = end + len(body[end:]) - len(body[end:].lstrip("; \n\t"))
    return pieces
