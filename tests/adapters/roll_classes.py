"""Two small classes in the interface of ROLL's agentic environments, for the tests."""

from __future__ import annotations

import random
from typing import Any


class Corridor:
    """Walk to the right end; the page comes in `suffix`, as in ROLL's grid worlds."""

    def __init__(self, length: int = 4, max_steps: int = 8, format_penalty: float = -0.1) -> None:
        self.length, self.max_steps, self.format_penalty = length, max_steps, format_penalty
        self.at = self.num_steps = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        self.at, self.num_steps = random.randrange(self.length - 1), 0
        return "Reach G.", {"suffix": self.render(), "env_instruction": "Say left or right."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = {"left": -1, "right": 1}.get(action.strip().lower())
        self.num_steps += 1
        reward = self.format_penalty if move is None else 0.0
        self.at = max(0, self.at + (move or 0))
        done = self.at == self.length - 1
        metrics = {"action_is_valid": move is not None, "success": done, "format_penalty": reward}
        info = {
            "suffix": self.render(),
            "metrics": metrics,
            "metrics_agg_mode": {"action_is_valid": "mean", "success": "last"},
        }
        return "You moved.", reward + float(done), done, self.num_steps >= self.max_steps, info

    def render(self, mode: str = "text") -> str:
        cells = ["_"] * (self.length - 1) + ["G"]
        cells[self.at] = "P"
        return " ".join(cells)

    def get_all_actions(self) -> list[str]:
        return ["left", "right"]

    def sample_random_action(self) -> str:
        return random.choice(self.get_all_actions())

    def oracle(self) -> str | None:
        return "right"


class Sum:
    """One question; both ends are said at once, as ROLL's math environment does."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        rng = random.Random(seed)
        one, other = rng.randrange(1000, 5000), rng.randrange(1000, 5000)
        self.answer = str(one + other)
        return f"What is {one} + {other}?", {"answer": self.answer}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == self.answer
        metrics = {"action_is_valid": bool(action.strip()), "success": right}
        return "The end.", float(right), True, True, {"metrics": metrics}
