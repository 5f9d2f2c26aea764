"""Where tools come from that an environment did not write itself.

Takes: nothing. Gives: :class:`ToolSource`, the seam, and the errors and answers of tools. Never:
runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart_core.types import ToolSpec


class ToolError(Exception):
    """A tool could not do what it was asked; the policy is told why, and the episode goes on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to, where that is more than a text."""

    content: str
    """What the policy reads."""
    reward: float = 0.0
    done: bool = False
    """The episode is over."""
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """``reward_components`` of the step."""


class ToolSource(Protocol):
    """Tools of somebody else, such as an MCP server."""

    def tools(self) -> Sequence[ToolSpec]:
        """Return what can be called."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call one of them and return what it says; raise :class:`ToolError` where it fails."""

    def close(self) -> None:
        """Stop whatever was started; may be called twice."""
