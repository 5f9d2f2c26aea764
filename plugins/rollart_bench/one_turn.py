"""The shared work of both sides of ``bench loop``: prompts of digits, and a cheap reward.

Takes: an index; a completion. Gives: a prompt; a reward; the one-turn environment of both. Never:
differs between the sides.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import gymnasium

from rollart_core.spaces import Text
from rollart_core.types import Observation

NUM_TASKS = 64
NUM_DIGITS = 13
"""With a word mark and the two tokens of the chat template, the prompt has 16 tokens."""


def digits(index: int) -> str:
    """Return the prompt of a task."""
    return "".join(random.Random(index).choices("0123456789", k=NUM_DIGITS))


def vowel_share(text: str) -> float:
    """Return the share of vowels among the letters. It differs between members of a group."""
    return sum(map(text.count, "aeiou")) / max(1, len(text))


class OneTurnEnv(gymnasium.Env[Observation, str]):
    """Shows digits and rewards the vowels of the answer."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self) -> None:
        self.observation_space = Text()
        self.action_space = Text()

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return NUM_TASKS

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Show the digits of the task."""
        super().reset(seed=seed)
        given = options or {}
        first = 0 if given.get("split", "train") == "train" else NUM_TASKS
        return digits(first + int(given.get("task") or 0)), {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Reward the answer and end the episode."""
        return "", vowel_share(action), True, False, {}
