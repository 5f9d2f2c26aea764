"""Calls that are JSON objects between tags.

    Hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    Phi-4     <|tool_call|>[{"name": "f", "arguments": {...}}, ...]<|/tool_call|>

Takes: the text of a message. Gives: its parts. Never: repairs JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolSpec
from rollart_plugins.tool_formats.parsing import (
    FAULTS,
    Found,
    function,
    json_end,
    json_list,
    split_thought,
    with_thought,
)


class Hermes(ToolFormat):
    """Hermes, Qwen2.5 and Qwen3."""

    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    thought = "<think>"
    _opens, _closes = "<tool_call>", "</tool_call>"

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message. Policies often end it instead of closing the last call."""
        found = Found('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        before, mark, text = text.partition(self._opens)
        found.said.append(before)
        while mark:
            end = self._end(text)
            found.take_json(text[:end].strip(), "arguments")
            after, mark, text = (
                text[end:].lstrip().removeprefix(self._closes).partition(self._opens)
            )
            found.said.append(after)
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message as Qwen3 writes it."""
        calls = [
            f'{self._opens}\n{{"name": "{name}", "arguments": {arguments}}}\n{self._closes}'
            for name, arguments in map(function, message.calls)
        ]
        return with_thought(
            message.reasoning, "\n".join([message.content] * bool(message.content) + calls)
        )

    def _end(self, text: str) -> int:
        """Return the end of the call at the start of the text: of its JSON, else at a mark."""
        try:
            end = json_end(text, 0)
            if not text[end:].strip() or text[end:].lstrip().startswith(
                (self._opens, self._closes)
            ):
                return end
        except FAULTS:
            pass
        ends = [text.find(mark) for mark in (self._opens, self._closes) if mark in text]
        return min(ends, default=len(text))

    def _is_in_call(self, text: str, at: int) -> bool:
        start = text.find(self._opens, 0, at)
        while start >= 0:
            end = start + len(self._opens)
            end += self._end(text[end:])
            if end > at:
                return True
            start = text.find(self._opens, end, at)
        return False


class Phi4(ToolFormat):
    """Phi-4-mini, with a list of calls."""

    marks = ("<|tool_call|>", "<|/tool_call|>")
    thought = "<think>"
    _starts = re.compile(r"<\|tool_call\|>|functools(?=\s*\[)")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message. Without special tokens, policies write ``functools`` as the mark."""
        found = Found('[{"name": "f", "arguments": {"a": 1}}] between the marks of calls')
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        at = 0
        while start := self._starts.search(text, at):
            found.said.append(text[at : start.start()])
            try:
                at = json_end(text, start.end())
            except FAULTS:
                end = text.find("<|/tool_call|>", start.end())
                at = end if end >= 0 else len(text)
            found.take_list(text[start.end() : at].strip())
            at += len("<|/tool_call|>") * text.startswith("<|/tool_call|>", at)
        found.said.append(text[at:])
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message."""
        calls = json_list(message.calls)
        block = f"<|tool_call|>{calls}<|/tool_call|>" if message.calls else ""
        return with_thought(message.reasoning, message.content + block)

    def _is_in_call(self, text: str, at: int) -> bool:
        return bool(self._starts.search(text, 0, at))
