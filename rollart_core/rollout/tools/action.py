"""The action of an environment with tools: the policy's text and calls in one JSON text.

    {"content": "I look it up.", "tool_calls": [{"id": "call00000", "name": "find",
                                                "arguments": {"word": "red"}}]}

Takes: the text that ``env.step`` gets. Gives: :class:`ToolAction`. Never: depends on the format in
which a model writes calls. :mod:`rollart_core.models.tool_calls` parses it before ``env.step``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart_core.models.tool_calls import call_id
from rollart_core.types import FunctionCall, ToolCall


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    """The id that its answer refers to; empty: an id is generated from its position."""

    def wire(self) -> ToolCall:
        """Return the call in the format of OpenAI's chat API."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        function = FunctionCall(name=self.name, arguments=arguments)
        return ToolCall(id=self.id, type="function", function=function)


@dataclass(frozen=True, slots=True)
class ToolAction:
    """The text and the calls of the policy."""

    content: str = ""
    """Text of the answer, without the calls."""
    calls: tuple[Call, ...] = ()
    """Tool calls, in order."""

    def text(self) -> str:
        """Return the action as text for ``env.step``."""
        calls = [
            {**({"id": c.id} if c.id else {}), "name": c.name, "arguments": dict(c.arguments)}
            for c in self.calls
        ]
        return json.dumps({"content": self.content, "tool_calls": calls}, ensure_ascii=False)

    @classmethod
    def read(cls, action: str) -> ToolAction:
        """Parse an action; if it is not such JSON, the whole text is the content."""
        try:
            value = json.loads(action)
        except (ValueError, RecursionError):
            return cls(action)
        if not isinstance(value, dict) or not {"content", "tool_calls"} & value.keys():
            return cls(action)
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            return cls(action)
        return cls(
            str(value.get("content") or ""),
            tuple(
                Call(c["name"], c.get("arguments") or {}, c.get("id") or call_id(0, i))
                for i, c in enumerate(calls)
            ),
        )


def _is_call(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments") or {}, dict)
        and isinstance(value.get("id") or "", str)
    )
