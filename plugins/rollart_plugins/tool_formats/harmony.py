"""The harmony format of gpt-oss: a message is a sequence of parts with a channel each.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

Takes: the text of a message, which begins after ``<|start|>assistant``. Gives: its parts. Never:
repairs JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolCall, ToolSpec
from rollart_plugins.tool_formats.parsing import FAULTS, Found, function, json_end

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CUT_CALL = re.compile(
    r"\s*(?:<\|start\|>assistant)?\s*(?:<\|channel\|>\s*[a-z]*)?\s*to=(?:functions\.)?([^\s<]+)"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class Harmony(ToolFormat):
    """gpt-oss."""

    marks = ("<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "<|constrain|>")
    stops = ("<|call|>",)

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message. The recipient stands before or after the channel."""
        found, thoughts, at = Found('{"a": 1} as the message to=functions.f'), [], 0
        while (start := text.find(_MESSAGE, at)) >= 0:
            head, start = text[at:start], start + len(_MESSAGE)
            recipient = _RECIPIENT.search(head)
            end, next_at = _body_end(text, start, recipient is not None)
            body = text[start:end]
            channel = _CHANNEL.search(head)
            if recipient:
                cut = body.strip() or "?"  # without arguments, policies write {}
                found.take(recipient[1], cut, f"{head}{_MESSAGE}{body}")
            elif channel and channel[1] == "analysis":
                thoughts.append(body)
            else:
                found.said.append(body)
            at = next_at
        if recipient := _CUT_CALL.match(text, at):
            found.fail(text[at:], f"the call of {recipient[1]} has no arguments")
        elif at == 0 and _CHANNEL.search(text) is None:
            found.said.append(text)  # the special tokens are missing: a plain answer
        found.reasoning = "\n".join(thoughts).strip()
        found.said = ["\n".join(found.said)]
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message. Text before calls is a preamble in the channel commentary."""
        parts = []
        if message.reasoning:
            parts.append(f"<|channel|>analysis{_MESSAGE}{message.reasoning}")
        if message.content or not (message.calls or message.reasoning):
            channel = "commentary" if message.calls else "final"
            parts.append(f"<|channel|>{channel}{_MESSAGE}{message.content}")
        text = "<|end|><|start|>assistant".join([*parts, *map(_written, message.calls)])
        calls_ended = text.replace(
            "}<|end|><|start|>assistant<|channel|>commentary to=", _NEXT_CALL
        )
        return calls_ended if message.calls else text


_NEXT_CALL = "}<|call|><|start|>assistant<|channel|>commentary to="


def _written(call: ToolCall) -> str:
    name, arguments = function(call)
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}{_MESSAGE}{arguments}"


def _body_end(text: str, start: int, is_call: bool) -> tuple[int, int]:
    """Return the end of a part, and where the next one begins. JSON may contain the marks."""
    at = start
    if is_call:
        try:
            at = json_end(text, start)
        except FAULTS:
            at = start
    end = _ENDS.search(text, at)
    assert end is not None, "the pattern matches the end of a text"
    return end.start(), end.end()
