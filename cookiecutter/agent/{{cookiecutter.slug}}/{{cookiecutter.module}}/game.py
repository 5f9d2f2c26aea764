"""The world that the program acts in: a hidden number, and what it says to a guess."""

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
        """What the agent is asked first."""
        return f"I think of a number from 1 to {self.highest}. Which one? Answer with a number."

    def guess(self, said: str) -> str:
        """Take a guess, and say in which direction the number lies."""
        self.num_guesses += 1
        words = re.findall(r"\d+", said)
        if len(words) != 1:
            return "That is not one number."
        guessed = int(words[0][:9])
        self.found = guessed == self.number
        return "Yes!" if self.found else "Higher." if guessed < self.number else "Lower."


def draw_game(split: str, task: int, highest: int) -> Game:
    """Return the game of a task: the same one each time."""
    if split not in NUM_TASKS:
        raise ValueError(f"split {split!r} is not one of {', '.join(NUM_TASKS)}")
    if not 0 <= task < NUM_TASKS[split]:
        raise ValueError(f"task {task} is not in split {split!r} of {NUM_TASKS[split]}")
    return Game(random.Random(f"{split} {task} {highest}").randint(1, highest), highest)
