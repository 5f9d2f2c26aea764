"""Calls that are a name, and arguments as JSON, between marks.

    Mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
              [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                since 2025

Takes: the text of a message. Gives: its parts. Never: repairs JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat, strict_json
from rollart_core.types import ToolSpec
from rollart_plugins.tool_formats.parsing import (
    FAULTS,
    Found,
    dumps,
    function,
    json_end,
    split_thought,
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
                self._take_list(found, text[:end].strip())
            else:
                found.take(named[1], text[named.end() : end].strip(), text[:end])
            after, mark, text = text[end:].partition(self._opens)
            found.said.append(f"\n{after.strip()}")
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message with a list of calls."""
        calls = ", ".join(
            f'{{"name": "{name}", "arguments": {arguments}}}'
            for name, arguments in map(function, message.calls)
        )
        thought = f"[THINK]{message.reasoning}[/THINK]" if message.reasoning else ""
        return thought + message.content + (f"{self._opens}[{calls}]" if calls else "")

    def _end(self, text: str, start: int) -> int:
        """Return the end of the JSON at ``start``. If it is not valid, of the text to the mark."""
        try:
            return json_end(text, start)
        except FAULTS:
            end = text.find(self._opens, start)
            return end if end >= 0 else len(text)

    def _take_list(self, found: Found, text: str) -> None:
        try:
            calls = strict_json(text)
        except FAULTS as e:
            found.fail(text, f"the tool calls are not valid JSON: {e}")
            return
        for call in calls if isinstance(calls, list) else [calls]:
            found.take_object(call, dumps(call), "arguments")

    def _is_in_call(self, before: str) -> bool:
        return self._opens in before
