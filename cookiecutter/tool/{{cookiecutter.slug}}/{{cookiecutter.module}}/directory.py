"""The directory of a task: people and their teams."""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "ivan", "jade")
TEAMS = ("sales", "design", "press", "legal", "finance", "research", "support", "travel")
FIRST = {"train": 10_000, "test": 90_000}
"""The number of the first request of each split, so that the splits share no task."""


@dataclass(frozen=True)
class Request:
    """The question of a task."""

    number: int
    name: str
    teams: dict[str, str]
    """Name -> team."""

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.teams[self.name]


def draw_request(split: str, index: int, people: int) -> Request:
    """Return the request of a task."""
    rng = random.Random(f"{split} {index} {people}")
    teams = {name: rng.choice(TEAMS) for name in NAMES[:people]}
    return Request(FIRST[split] + index, rng.choice(list(teams)), teams)
