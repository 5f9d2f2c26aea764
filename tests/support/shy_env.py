"""An environment without an expert, that says nothing of success and breaks on an empty action."""

from __future__ import annotations

from typing import Any


class ShyEnv:
    """Earns 1 for the word yes, in one turn."""

    def num_tasks(self, split: str) -> int:
        return 4

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "yes or no?", {"available_actions": ["yes", "no"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not action:
            raise ValueError("nothing was said")
        return "so it is", float(action == "yes"), True, False, {}

    def close(self) -> None:
        pass
