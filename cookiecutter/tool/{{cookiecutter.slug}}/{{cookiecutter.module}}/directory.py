"""The directory of a task: people and their teams."""

from __future__ import annotations

import random
from hashlib import blake2b

NAMES = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "ivan", "jade")
TEAMS = ("sales", "design", "press", "legal", "finance", "research", "support", "travel")


def draw_directory(split: str, index: int, people: int) -> tuple[str, dict[str, str]]:
    """Return the name to look up, and the directory.

    The splits have no question with the same answer in common.
    """
    rng = random.Random(f"{split} {index} {people}")
    while True:
        teams = {name: rng.choice(TEAMS) for name in NAMES[:people]}
        name = rng.choice(list(teams))
        if split_of(name, teams[name]) == split:
            return name, teams


def split_of(name: str, team: str) -> str:
    """Return the split of a question and its answer, by a hash: one in five is in `test`."""
    digest = blake2b(f"{name} {team}".encode(), digest_size=1).digest()
    return "test" if digest[0] < 256 // 5 else "train"
