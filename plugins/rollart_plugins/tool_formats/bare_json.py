"""Calls that are JSON objects without tags.

    Llama 3   {"name": "f", "parameters": {...}}; {...}     optionally after <|python_tag|>

Takes: the text of a message. Gives: its parts. Never: takes other JSON for a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat
from rollart_core.types import ToolSpec
from rollart_plugins.tool_formats.parsing import (
    BARE_CALL,
    Found,
    function,
    json_pieces,
    split_thought,
    with_thought,
)


class Llama3(ToolFormat):
    """Llama 3.1 and later."""

    marks = ("<|python_tag|>",)
    stops = ("<|eom_id|>",)
    thought = "<think>"
    _tag = "<|python_tag|>"

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message. A message is either text or calls, unless a tag is between them."""
        found = Found('{"name": "f", "parameters": {"a": 1}}')
        found.reasoning, text = split_thought(text, "<think>", "</think>", self._is_in_call)
        before, _, calls = ("", "", text) if BARE_CALL.match(text) else text.partition(self._tag)
        found.said.append(before)
        for piece in json_pieces(calls.strip()):
            found.take_json(piece, "parameters")
        return found.message()

    def render(self, message: ParsedMessage) -> str:
        """Return the message; with text, a tag is before the calls."""
        calls = "; ".join(
            f'{{"name": "{name}", "parameters": {arguments}}}'
            for name, arguments in map(function, message.calls)
        )
        tag = self._tag if message.content and calls else ""
        return with_thought(message.reasoning, f"{message.content}{tag}{calls}")

    def _is_in_call(self, text: str, at: int) -> bool:
        return bool(BARE_CALL.match(text, 0, at)) or self._tag in text[:at]
