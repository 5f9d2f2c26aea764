"""Calls that are written as in Python.

    LFM2      <|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>
    Llama 4   [f(a=1), g(b="x")]           optionally between <|python_start|> and <|python_end|>
    OLMo 3    <function_calls>f(a=1)
              g(b="x")</function_calls>
    Gemma 3   ```tool_code
              f(a=1)
              ```

Takes: the text of a message. Gives: its parts. Never: evaluates code, or takes variables as values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolCall, ToolSpec
from rollart_plugins.tool_formats.parsing import (
    BARE_CALL,
    FAULTS,
    Found,
    dumps,
    function,
    json_pieces,
    split_thought,
    with_thought,
)
from rollart_plugins.tool_formats.values import Reader

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_AFTER_ARGUMENT = re.compile(r"\s*(,\s*[A-Za-z_][\w.\-]*\s*=|\)\s*($|[,\]\n]|</|<\||```))")
"""What follows a string that is an argument."""


class Lfm2(ToolFormat):
    """LFM2 and LFM2.5, and base of the other formats with calls as in Python."""

    marks: tuple[str, ...] = ("<|tool_call_start|>", "<|tool_call_end|>")
    thought = "<think>"
    shape = '[f(a=1, b="x")]'
    opens, closes = "<|tool_call_start|>", "<|tool_call_end|>"
    before, between, after = "[", ", ", "]"
    """Text around the calls when they are written."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message."""
        found = Found(self.shape)
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        before, mark, text = text.partition(self.opens)
        found.said.append(before)
        while mark:
            end = take_calls(found, text, self.closes)
            after, mark, text = text[end:].partition(self.opens)
            found.said.append(after)
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message."""
        calls = self.between.join(map(written, message.calls))
        block = f"{self.opens}{self.before}{calls}{self.after}{self.closes}" if calls else ""
        return with_thought(message.reasoning, message.content + block)

    def _is_in_call(self, text: str, at: int) -> bool:
        end = 0
        while (start := text.find(self.opens, end, at)) >= 0:
            start += len(self.opens)
            end = start + take_calls(Found(self.shape), text[start:], self.closes)
            if end > at:
                return True
        return False


class Olmo3(Lfm2):
    """OLMo 3."""

    marks = ("<function_calls>", "</function_calls>")
    shape = '<function_calls>f(a=1, b="x")</function_calls>'
    opens, closes = "<function_calls>", "</function_calls>"
    before, between, after = "", "\n", ""


class Gemma3(Lfm2):
    """Gemma 3, which is trained on code blocks. Its template shows no tools."""

    marks = ()
    shape = '```tool_code f(a=1, b="x") ``` with the call on its own line'
    opens, closes = "```tool_code\n", "\n```"
    before, between, after = "", "\n", ""


class Llama4(Lfm2):
    """Llama 4: the whole message is a list of calls, or JSON as for Llama 3."""

    marks = ("<|python_start|>", "<|python_end|>")
    stops = ("<|eom|>",)
    opens = closes = ""
    _starts = re.compile(r"\s*\[\s*[A-Za-z_][\w.\-]*\(")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message. The marks may be around calls, or around text before JSON."""
        found = Found(self.shape)
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        start, end = self.marks
        body = text.strip().removeprefix(start)
        said, calls = "", body
        if not self._is_call(body):
            said, _, calls = body.partition(end)
        if BARE_CALL.match(calls):
            found.said.append(said)
            for piece in json_pieces(calls.strip().removesuffix(end)):
                found.take_json(piece, "parameters")
        elif self._is_call(calls):
            found.said.append(said)
            found.said.append(calls[take_calls(found, calls, end) :])
        else:
            found.said.append(text.replace(start, "").replace(end, ""))
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message; with text, the calls are JSON after the marks."""
        if not (message.content and message.calls):
            return super().render(message)
        objects = ('{{"name": "{}", "parameters": {}}}'.format(*function(c)) for c in message.calls)
        said = f"<|python_start|>{message.content}<|python_end|>{''.join(objects)}"
        return with_thought(message.reasoning, said)

    def _is_in_call(self, text: str, at: int) -> bool:
        return self._is_call(text[:at]) or self.marks[1] in text[:at]

    def _is_call(self, text: str) -> bool:
        return bool(self._starts.match(text) or BARE_CALL.match(text))


def take_calls(found: Found, text: str, closes: str) -> int:
    """Take the calls at the start of the text. Return the end of the calls and their mark."""
    reader, call = Reader(text), 0
    try:
        reader.space()
        is_list = reader.skip("[")
        while not (is_list and reader.skip("]")):
            reader.space()
            call = reader.at
            if not is_list and (call == len(text) or text.startswith(closes.strip(), call)):
                break
            _take_call(found, reader)
            reader.skip(",")
    except FAULTS as e:
        end = text.find(closes, reader.at)
        reader.at = end if end >= 0 else len(text)
        found.fail(text[call : reader.at], f"the tool call is not valid: {e}")
    reader.skip(closes.strip())
    return reader.at


def _take_call(found: Found, reader: Reader) -> None:
    start = reader.at
    if reader.text.startswith("{", start):  # some policies write JSON in the same marks
        call = reader.value()
        found.take_object(call, dumps(call), "arguments")
        return
    name = _NAME.match(reader.text, start)
    if name is None:
        raise ValueError(f"expected the name of a tool, got {reader.text[start : start + 20]!r}")
    reader.at = name.end()
    reader.expect("(")
    arguments: dict[str, Any] = {}
    while not reader.skip(")"):
        reader.space()
        key = _NAME.match(reader.text, reader.at)
        if key is None:
            raise ValueError(f"{name[0]}: each argument is written as name=value")
        reader.at = key.end()
        reader.expect("=")
        arguments[key[0]] = reader.value(_AFTER_ARGUMENT)
        if not reader.skip(","):
            reader.expect(")")
            break
    found.take_values(name[0], arguments, reader.text[start : reader.at])


def written(call: ToolCall) -> str:
    """Return a call as Python."""
    name, arguments = function(call)
    pairs = (f"{key}={_python(value)}" for key, value in json.loads(arguments).items())
    return f"{name}({', '.join(pairs)})"


def _python(value: Any) -> str:
    """Return a JSON value as Python. Strings are in double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{dumps(key)}: {_python(v)}' for key, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return repr(value) if value is None or isinstance(value, bool) else dumps(value)
