"""The game that the program plays: a hidden number, and the reply to each guess."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

NUM_TASKS = {"train": 10_000, "test": 1_000}


@dataclass
class Game:
    """One hidden number."""

    number: int
    highest: int
    found: bool = False
    num_guesses: int = 0

    @property
    def question(self) -> str:
        """The first message to the agent."""
        return f"I think of a number from 1 to {self.highest}. Which one? Answer with a number."

    def guess(self, said: str) -> str:
        """Take a guess, and return whether the number is higher or lower."""
        self.num_guesses += 1
        words = re.findall(r"\d+", said)
        if len(words) != 1:
            return "That is not one number."
        guessed = int(words[0][:9])
        self.found = guessed == self.number
        return "Yes!" if self.found else "Higher." if guessed < self.number else "Lower."


def draw_game(split: str, task: int, highest: int) -> Game:
    """Return the game of a task, always the same one."""
    if split not in NUM_TASKS:
        raise ValueError(f"split {split!r} is not one of {', '.join(NUM_TASKS)}")
    if not 0 <= task < NUM_TASKS[split]:
        raise ValueError(f"task {task} is not in split {split!r} of {NUM_TASKS[split]}")
    return Game(random.Random(f"{split} {task} {highest}").randint(1, highest), highest)
