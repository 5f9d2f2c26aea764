"""Calls that are a name, and arguments as JSON, between marks.

    Mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
              [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                since 2025
    DeepSeek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    V3, R1    ```json
              {...}
              ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1      <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
    Kimi K2   <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
              <|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>

Takes: the text of a message. Gives: its parts. Never: repairs JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolCall, ToolSpec
from rollart_plugins.tool_formats.parsing import (
    FAULTS,
    Found,
    function,
    json_end,
    json_list,
    split_thought,
    with_thought,
)


class Mistral(ToolFormat):
    """Mistral and Mixtral, with a list of calls or with a name before each call."""

    marks = ("[TOOL_CALLS]", "[THINK]", "[/THINK]")
    thought = "[THINK]"
    _opens = "[TOOL_CALLS]"
    _named = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message."""
        found = Found('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]')
        opens, closes = ("[THINK]", "[/THINK]") if "[/THINK]" in text else ("<think>", "</think>")
        found.reasoning, text = split_thought(text, opens, closes, self._is_in_call)
        before, mark, text = text.partition(self._opens)
        found.said.append(before)
        while mark:
            named = self._named.match(text)
            end = self._end(text, named.end() if named else 0)
            if named is None:
                found.take_list(text[:end].strip())
            else:
                found.take(named[1], text[named.end() : end].strip(), text[:end])
            after, mark, text = text[end:].partition(self._opens)
            found.said.append(f"\n{after.strip()}")
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message with a list of calls."""
        thought = f"[THINK]{message.reasoning}[/THINK]" if message.reasoning else ""
        return (
            thought
            + message.content
            + (f"{self._opens} {json_list(message.calls)}" if message.calls else "")
        )

    def _end(self, text: str, start: int) -> int:
        """Return the end of the JSON at ``start``. If it is not valid, of the text to the mark."""
        try:
            return json_end(text, start)
        except FAULTS:
            end = text.find(self._opens, start)
            return end if end >= 0 else len(text)

    def _is_in_call(self, text: str, at: int) -> bool:
        return self._opens in text[:at]


class DeepSeekV31(ToolFormat):
    """DeepSeek V3.1 and V3.2, and base of formats with a section of calls."""

    marks: tuple[str, ...] = (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<think>", "</think>"),
    )
    thought = "<think>"
    shape = 'the name of a tool, its mark, and the arguments as JSON, such as {"a": 1}'
    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    opens, closes = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    head = re.compile(r"\s*(?P<name>[^\s<｜]+)\s*<｜tool▁sep｜>")
    """The text of a call before its arguments. Group ``name`` is the tool, ``id`` the id."""
    fence = re.compile(r"\s*")
    """The text of a call after its arguments."""
    between = ""
    """The text between two calls."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message."""
        found = Found(self.shape)
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        before, mark, text = text.partition(self.opens)
        found.said.append(before.replace(self.section, ""))
        while mark:
            after, mark, text = text[self._take(found, text) :].partition(self.opens)
            found.said.append(after.replace(self.section_end, "").replace(self.section, ""))
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message."""
        calls = self.between.join(map(self.written, range(len(message.calls)), message.calls))
        section = f"{self.section}{calls}{self.section_end}" if calls else ""
        return with_thought(message.reasoning, message.content + section)

    def written(self, index: int, call: ToolCall) -> str:
        """Return one call."""
        name, arguments = function(call)
        return f"{self.opens}{name}<｜tool▁sep｜>{arguments}{self.closes}"

    def _take(self, found: Found, text: str) -> int:
        """Take the call at the start of the text. Return its end."""
        head = self.head.match(text)
        try:
            end = json_end(text, head.end()) if head else 0
            after = self.fence.match(text, end)
            closed = after is not None and text.startswith(self.closes, after.end())
        except FAULTS:
            closed = False
        if head and closed and after:
            found.take(head["name"], text[head.end() : end].strip(), text[:end])
            return after.end() + len(self.closes)
        end = text.find(self.closes)
        block = text[: end if end >= 0 else len(text)]
        if head is None:
            found.fail(block, "the tool call has no name, or no mark after it")
        else:
            number = len(found.errors)
            found.take(head["name"], block[head.end() :].strip(), block)
            if number == len(found.errors):  # the JSON is valid
                found.calls.pop()
                found.fail(block, f"the end of the call of {head['name']} is missing")
        return len(block) + (len(self.closes) if end >= 0 else 0)

    def _is_in_call(self, text: str, at: int) -> bool:
        return self.opens in text[:at]


class DeepSeekV3(DeepSeekV31):
    """DeepSeek V3 and R1."""

    shape = 'function, its mark, the name of a tool, and a code block with JSON, such as {"a": 1}'
    head = re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n")
    fence = re.compile(r"\s*```\s*")
    between = "\n"

    def written(self, index: int, call: ToolCall) -> str:
        """Return one call."""
        name, arguments = function(call)
        code = f"```json\n{arguments}\n```"
        return f"{self.opens}function<｜tool▁sep｜>{name}\n{code}{self.closes}"


class KimiK2(DeepSeekV31):
    """Kimi K2. The id of a call contains the name of its tool."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    opens, closes = "<|tool_call_begin|>", "<|tool_call_end|>"
    arguments = "<|tool_call_argument_begin|>"
    marks = (section, section_end, opens, closes, arguments, "<think>", "</think>")
    head = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>"
    )

    def written(self, index: int, call: ToolCall) -> str:
        """Return one call."""
        name, arguments = function(call)
        given = self.call_id(name, index)
        return f"{self.opens}{given}{self.arguments}{arguments}{self.closes}"

    def call_id(self, name: str, index: int) -> str:
        """Return the id that the chat template writes instead of the name."""
        return f"functions.{name}:{index}"
