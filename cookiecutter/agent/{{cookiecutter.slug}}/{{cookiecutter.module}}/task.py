"""The task: it prepares and runs the program, and computes the reward."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded

from {{ cookiecutter.module }}.config import {{ cookiecutter.base }}Config
from {{ cookiecutter.module }}.game import NUM_TASKS, Game, draw_game
from {{ cookiecutter.module }}.program import Chat, play


class {{ cookiecutter.class_name }}:
    """Guess a number. Each reply is whether it is higher or lower.

    Args:
        options: The fields of {{ cookiecutter.base }}Config.
    """

    def __init__(self, **options: Any) -> None:
        self.config = {{ cookiecutter.base }}Config(**options)
        self._game = draw_game("train", 0, self.config.highest)

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return NUM_TASKS[split]

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Start the task of `options` (`task`, `split`), or one drawn with the seed."""
        split, task = options.get("split", "train"), options.get("task")
        if task is None:
            task = random.Random(seed).randrange(NUM_TASKS[split])
        self._game = draw_game(split, task, self.config.highest)
        return AgentStart(self._game.question)

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program. Do not catch a cancellation, so that the program ends with it."""
        chat = Chat(endpoint.base_url, endpoint.api_key, endpoint.model)
        await play(chat, self._game, self.config.num_guesses)

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Grade the program's result. `recorded.messages` is the last conversation."""
        found, num_guesses = self._game.found, self._game.num_guesses
        return AgentResult(float(found), found, {"guesses": float(num_guesses)})

    def close(self) -> None:
        """Free resources; there are none."""

    async def solve(self) -> None:
        """Act as an expert, without a model: checks compare the reward with it."""
        self._game.guess(str(self._game.number))

    def secrets(self) -> Sequence[str]:
        """Return texts that the agent must never see."""
        return [f"the number is {self._game.number}"]

    def corpus(self) -> Iterator[str]:
        """Yield typical texts, for the tokenizer of a new model."""
        for task in range(200):
            game = Game(1 + task % self.config.highest, self.config.highest)
            yield game.question
            for number in range(1, self.config.highest + 1):
                yield f"{number} {game.guess(str(number))}"
