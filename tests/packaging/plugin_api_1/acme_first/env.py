"""An environment of one turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium

from rollart_core.spaces import Text

LETTERS = "abcdefgh"


class Echo(gymnasium.Env[str, str]):
    """Asks for a letter, and pays for an answer that begins with it."""

    def __init__(self) -> None:
        self.observation_space = Text()
        self.action_space = Text()
        self._letter = ""

    def num_tasks(self, split: str) -> int:
        """Return how many letters there are."""
        return len(LETTERS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Ask for the letter of the task."""
        super().reset(seed=seed)
        self._letter = LETTERS[(options or {}).get("task", 0)]
        return f"Write {self._letter}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge the answer."""
        right = action.strip().startswith(self._letter)
        return "", float(right), True, False, {"success": right}

    def oracle(self) -> str:
        """Return the letter."""
        return self._letter

    def corpus(self) -> Iterable[str]:
        """Yield every question and answer."""
        for letter in LETTERS:
            yield f"Write {letter}."
            yield letter
