"""The format of Gemma 4: calls with strings between special tokens.

    <|channel>thought
    reasoning
    <channel|><|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>

Takes: the text of a message. Gives: its parts. Never: guesses the end of a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolCall, ToolSpec
from rollart_plugins.tool_formats.parsing import FAULTS, Found, dumps, function, split_thought
from rollart_plugins.tool_formats.values import Reader

_OPENS, _CLOSES, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"\s*call:([^\s{}<>]+)(?=\s*\{)")


class Gemma4(ToolFormat):
    """Gemma 4."""

    marks = (_OPENS, _CLOSES, _QUOTE, "<|channel>", "<channel|>")
    stops = ("<|tool_response>",)
    thought = "<|channel>thought"

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message."""
        found = Found("call:f{a:1,b:[2,true]} between the marks of a call")
        text = text.removesuffix("<|tool_response>")
        found.reasoning, text = split_thought(text, self.thought, "<channel|>", self._is_in_call)
        before, mark, text = text.partition(_OPENS)
        found.said.append(before)
        while mark:
            after, mark, text = text[_take(found, text) :].partition(_OPENS)
            found.said.append(after)
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message."""
        thought = f"{self.thought}\n{message.reasoning}\n<channel|>" if message.reasoning else ""
        return thought + message.content + "".join(map(_written, message.calls))

    def _is_in_call(self, text: str, at: int) -> bool:
        return text.rfind(_OPENS, 0, at) > text.rfind(_CLOSES, 0, at)


def _take(found: Found, text: str) -> int:
    """Take the call at the start of the text. Return its end."""
    name, reader = _NAME.match(text), Reader(text, 0, (_QUOTE, '"'))
    try:
        if name is None:
            raise ValueError("expected call: and the name of a tool")
        reader.at = name.end()
        arguments = reader.value()
        reader.expect(_CLOSES)
    except FAULTS as e:
        end = text.find(_CLOSES, reader.at)
        end = end + len(_CLOSES) if end >= 0 else len(text)
        found.fail(text[:end], f"the tool call is not valid: {e}")
        return end
    found.take_values(name[1], arguments, text[: reader.at])
    return reader.at


def _written(call: ToolCall) -> str:
    name, arguments = function(call)
    return f"{_OPENS}call:{name}{_value(json.loads(arguments))}{_CLOSES}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_value(v)}' for key, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return f"{_QUOTE}{value}{_QUOTE}" if isinstance(value, str) else dumps(value)
