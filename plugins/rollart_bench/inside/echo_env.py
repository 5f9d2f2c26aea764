"""The environment of `rollart bench isolation`; of the standard library alone, for any box.

Takes: any text. Gives: a page of text with it, and no reward; no episode of it ends. Never: imports
RollArt or gymnasium, which boxes need not have.
"""

from __future__ import annotations

from typing import Any


class EchoEnv:
    """Says what it is told, after a page of text."""

    PAGE = "You stand in a room. " * 20

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        return self.PAGE, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        return self.PAGE + action, 0.0, False, False, {"available_actions": ["left", "right"]}

    def close(self) -> None:
        """Nothing to free."""
