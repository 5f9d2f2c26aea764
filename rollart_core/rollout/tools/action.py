"""The action of an environment with tools: what the policy said and called, as one JSON text.

    {"content": "I look it up.", "tool_calls": [{"id": "call00000", "name": "find",
                                                "arguments": {"word": "red"}}]}

Takes: the text that ``env.step`` gets. Gives: :class:`ToolAction`. Never: knows how a model writes
calls; that is :mod:`rollart_core.models.tool_calls`, in front of the environment.
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
    """One call."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    """What its answer names; empty: one is given by its place."""

    def wire(self) -> ToolCall:
        """Return the call in the shape of OpenAI's chat API."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        function = FunctionCall(name=self.name, arguments=arguments)
        return ToolCall(id=self.id, type="function", function=function)


@dataclass(frozen=True, slots=True)
class ToolAction:
    """What the policy said, and what it called."""

    content: str = ""
    calls: tuple[Call, ...] = ()

    def text(self) -> str:
        """Return the action as ``env.step`` takes it."""
        calls = [
            {**({"id": c.id} if c.id else {}), "name": c.name, "arguments": dict(c.arguments)}
            for c in self.calls
        ]
        return json.dumps({"content": self.content, "tool_calls": calls}, ensure_ascii=False)

    @classmethod
    def read(cls, action: str) -> ToolAction:
        """Return what an action says; one that is no such JSON is content as a whole."""
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
