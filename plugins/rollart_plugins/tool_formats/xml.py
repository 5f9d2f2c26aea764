"""Calls with a tag for each argument. Strings are written without quotes.

    Qwen3-Coder, Qwen3.5, Nemotron 3   <tool_call><function=f><parameter=a>
                                       1
                                       </parameter></function></tool_call>
    GLM-4.5                            <tool_call>f
                                       <arg_key>a</arg_key>
                                       <arg_value>1</arg_value>
                                       </tool_call>
    MiniMax M2                         <minimax:tool_call><invoke name="f">
                                       <parameter name="a">1</parameter>
                                       </invoke></minimax:tool_call>

Takes: the text of a message, and the tools, whose schemas have the types. Gives: its parts. Never:
takes a call whose end is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolCall, ToolSpec
from rollart_plugins.tool_formats.parsing import (
    Found,
    dumps,
    function,
    split_thought,
    with_thought,
)
from rollart_plugins.tool_formats.values import parameters_of, typed


class XmlFormat(ToolFormat):
    """Base of the formats with a tag for each argument."""

    thought = "<think>"
    opens: str
    closes: str
    """The marks around calls."""
    shape: str
    call: re.Pattern[str]
    """The start of a call inside the marks; group 1 is the name."""
    key: re.Pattern[str]
    """The start of an argument; group 1 is its name."""
    value_ends: re.Pattern[str]
    """The end of an argument."""
    ends: str
    """The end of a call."""
    written_call: str
    """A call, with ``{name}`` and ``{arguments}``."""
    written_argument: str
    """An argument, with ``{key}`` and ``{value}``."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message."""
        found = Found(self.shape)
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        at = 0
        while start := self._start(text, at):
            found.said.append(text[at : start.start()])
            at = start.end()
            while call := self.call.match(text, at):
                at = self._take(found, text, call, tools)
            if at == start.end():
                at = self._after_mark(text, at)
                found.fail(text[start.start() : at], "the tool call has no name of a tool")
            at = re.compile(rf"\s*{re.escape(self.closes)}|").match(text, at).end()  # type: ignore[union-attr]
        found.said.append(text[at:])
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message."""
        calls = "\n".join(map(self.written, message.calls))
        return with_thought(message.reasoning, "\n".join(filter(None, [message.content, calls])))

    def written(self, call: ToolCall) -> str:
        """Return one call."""
        name, arguments = function(call)
        values = json.loads(arguments).items()
        written = (self.written_argument.format(key=k, value=bare(v)) for k, v in values)
        return self.written_call.format(name=name, arguments="".join(written))

    def _take(self, found: Found, text: str, call: re.Match[str], tools: Sequence[ToolSpec]) -> int:
        """Take the call at a position. Return its end."""
        name, at = call[1].strip(), call.end()
        schema = parameters_of(tools, name)
        arguments: dict[str, Any] = {}
        while key := self.key.match(text, at):
            end = self.value_ends.search(text, key.end())
            if end is None:
                at = self._after_mark(text, key.end())
                found.fail(text[call.start() : at], f"{name}: the argument {key[1]} has no end")
                return at
            arguments[key[1]] = typed(text[key.end() : end.start()], key[1], schema)
            at = end.end()
        end = re.compile(rf"\s*{re.escape(self.ends)}").match(text, at)
        if end is None:
            at = self._after_mark(text, at)
            found.fail(text[call.start() : at], f"{name}: an argument or {self.ends} is missing")
            return at
        found.take_values(name, arguments, text[call.start() : end.end()])
        return end.end()

    def _start(self, text: str, at: int) -> re.Match[str] | None:
        """Return the next mark before calls."""
        return re.compile(re.escape(self.opens)).search(text, at)

    def _after_mark(self, text: str, at: int) -> int:
        """Return where parsing goes on after an invalid call: at the next mark."""
        ends = [i for mark in (self.opens, self.closes) if (i := text.find(mark, at)) >= 0]
        return min(ends, default=len(text))

    def _is_in_call(self, text: str, at: int) -> bool:
        end = 0
        while (start := self._start(text, end)) and start.start() < at:
            end = start.end()
            while call := self.call.match(text, end):
                found = Found(self.shape)
                end = self._take(found, text, call, ())
                if found.calls and end > at:
                    return True
            end = max(end, start.start() + 1)
        return False


class Qwen3Coder(XmlFormat):
    """Qwen3-Coder, Qwen3.5, Qwen3.6 and Nemotron 3."""

    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    opens, closes, ends = "<tool_call>", "</tool_call>", "</function>"
    shape = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    call = re.compile(r"\s*<function=([^>\n]+)>")
    key = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
    value_ends = re.compile(r"\n?</parameter>(?=\s*(<parameter=|</function>|\Z))")
    written_call = "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
    written_argument = "<parameter={key}>\n{value}\n</parameter>\n"

    def _start(self, text: str, at: int) -> re.Match[str] | None:
        """Return the next mark. Policies often omit the outer one."""
        return re.compile(r"<tool_call>|(?=<function=)").search(text, at)


class Glm45(XmlFormat):
    """GLM-4.5 and later. A message with calls ends where the role of the answers begins."""

    stops = ("<|observation|>",)
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    opens, closes, ends = "<tool_call>", "\0", "</tool_call>"
    shape = "<tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>"
    call = re.compile(r"(?<=<tool_call>)\s*([^<>\s]+)")
    key = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    value_ends = re.compile(r"</arg_value>(?=\s*(<arg_key>|</tool_call>|\Z))")
    written_call = "<tool_call>{name}\n{arguments}</tool_call>"
    written_argument = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"

    def _after_mark(self, text: str, at: int) -> int:
        ends = re.compile(r"(?=<tool_call>)|</tool_call>|\Z").search(text, at)
        return ends.end() if ends else len(text)


class MiniMaxM2(XmlFormat):
    """MiniMax M2."""

    marks = ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
    opens, closes, ends = "<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"
    shape = (
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>'
        "</minimax:tool_call>"
    )
    call = re.compile(r"\s*<invoke name=\"?([^\">\n]+)\"?>")
    key = re.compile(r"\s*<parameter name=\"?([^\">\n]+)\"?>")
    value_ends = re.compile(r"</parameter>(?=\s*(<parameter name=|</invoke>|\Z))")
    written_call = '<invoke name="{name}">\n{arguments}</invoke>\n'
    written_argument = '<parameter name="{key}">{value}</parameter>\n'

    def render(self, message: ParsedMessage) -> str:
        """Return the message; all calls are in one block."""
        calls = "".join(map(self.written, message.calls))
        block = f"{self.opens}\n{calls}{self.closes}" if calls else ""
        return with_thought(message.reasoning, "\n".join(filter(None, [message.content, block])))


def bare(value: object) -> str:
    """Return a value as JSON; a string without quotes."""
    return value if isinstance(value, str) else dumps(value)
