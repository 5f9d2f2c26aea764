"""The interface of external tools, such as those of an MCP server.

Takes: nothing. Gives: :class:`ToolSource`, and the errors and results of tools. Never: runs
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart_core.types import ToolSpec


class ToolError(Exception):
    """A call of a tool failed. The policy gets the message, and the episode continues."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call, for results that are more than text."""

    content: str
    """The text that the policy gets."""
    reward: float = 0.0
    done: bool = False
    """Whether the episode is over."""
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """``reward_components`` of the step."""


class ToolSource(Protocol):
    """A source of external tools, such as an MCP server."""

    def tools(self) -> Sequence[ToolSpec]:
        """Return the specs of the tools."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result; raise :class:`ToolError` if it fails."""

    def close(self) -> None:
        """Stop everything that was started; may be called twice."""
