"""The environment of `rollart bench isolation`. It needs only the standard library.

Takes: any text. Gives: a page with that text, and no reward; an episode never ends. Never: imports
RollArt or gymnasium, which a sandbox may not have.
"""

from __future__ import annotations

from typing import Any


class EchoEnv:
    """Returns a page of text with the action."""

    PAGE = "You stand in a room. " * 20

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        return self.PAGE, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        return self.PAGE + action, 0.0, False, False, {"available_actions": ["left", "right"]}

    def close(self) -> None:
        """Free nothing."""
