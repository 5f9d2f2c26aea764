"""Base of the grid worlds: four moves, tasks with their own seeds, and terse pages.

Takes: a task (split and index) and words. Gives: pages of letters, one per cell. Each letter is
after a space, so that every common tokenizer makes one token of a cell. Never: uses a model or
tokenizer.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, TypeAlias

import gymnasium

from rollart_core.spaces import Text
from rollart_core.types import Observation

Cell: TypeAlias = tuple[int, int]
"""Row and column, from 0 at the top left."""

MOVES: dict[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
ACTIONS = tuple(MOVES)
_MAX_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Split:
    """A range of task seeds, and the buckets of levels it can use, each a tenth of all levels."""

    first_seed: int
    num_tasks: int
    buckets: frozenset[int]


SPLITS = {
    "train": Split(0, 100_000, frozenset(range(8))),
    "warm": Split(1_000_000, 1_000, frozenset({8})),
    "test": Split(2_000_000, 1_000, frozenset({9})),
}


class GridEnv(gymnasium.Env[Observation, str]):
    """Base of the grid worlds.

    Splits differ in seeds and in levels. The hash of a level decides which split it belongs to, so
    no test level is used for training.

    Args:
        hint: Explain letters and moves on the first page.
        max_turns: Turns after which an episode is truncated.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    heading: ClassVar[str]
    explanation: ClassVar[str]

    def __init__(self, *, hint: bool, max_turns: int) -> None:
        self.observation_space = Text()
        self.action_space = Text()
        self.hint = hint
        self.max_turns = max_turns
        self._turn = 0
        self._over = True

    @abstractmethod
    def draw(self, rng: random.Random) -> str | None:
        """Draw a level, one line per row; None if the attempt failed."""

    @abstractmethod
    def load(self, level: str) -> None:
        """Start at the start of a level."""

    @abstractmethod
    def move(self, action: str) -> tuple[float, bool]:
        """Carry out one of the four moves; return the reward and whether the game ended."""

    @abstractmethod
    def rows(self) -> list[str]:
        """Return the current grid, one letter per cell."""

    @property
    @abstractmethod
    def solved(self) -> bool:
        """Whether the goal is reached."""

    @abstractmethod
    def oracle(self) -> str | None:
        """Return the first move of a shortest solution; None if there is none."""

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return _split(split).num_tasks

    def level(self, split: str, index: int) -> str:
        """Return the level of a task, one line per row."""
        part = _split(split)
        if not 0 <= index < part.num_tasks:
            raise ValueError(f"task {index} is not in split {split!r}: 0 to {part.num_tasks - 1}")
        rng = random.Random(part.first_seed + index)
        for _ in range(_MAX_DRAWS):
            level = self.draw(rng)
            if level is not None and _bucket(level) in part.buckets:
                return level
        raise ValueError(
            f"no level for split {split!r} in {_MAX_DRAWS} draws: the options allow too few levels"
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the task of ``options`` (``task``, ``split``), or one drawn by ``seed``."""
        super().reset(seed=seed)
        options = options or {}
        split = options.get("split", "train")
        index = options.get("task")
        if index is None:
            index = int(self.np_random.integers(self.num_tasks(split)))
        self.load(self.level(split, index))
        self._turn, self._over = 0, False
        page = self._page()
        return (f"{self.explanation}\n{page}" if self.hint else page), self._info()

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move; any other word than the four moves has no effect."""
        if self._over:
            raise RuntimeError("the episode is over: call reset() first")
        word = action.strip().lower()
        valid = word in MOVES
        reward, terminated = self.move(word) if valid else (0.0, False)
        self._turn += 1
        truncated = not terminated and self._turn >= self.max_turns
        self._over = terminated or truncated
        return self._page(), reward, terminated, truncated, self._info(invalid=not valid)

    def close(self) -> None:
        """End the episode; there is nothing else to free."""
        self._over = True

    def corpus(self) -> Iterator[str]:
        """Yield pages and moves of training tasks, a very large number of them.

        Half of the moves are the oracle's and half are random, so that every word is frequent.
        """
        for index in range(self.num_tasks("train")):
            page, _ = self.reset(seed=index, options={"task": index, "split": "train"})
            yield str(page)
            yield from self._play(random.Random(index))

    def _play(self, rng: random.Random) -> Iterator[str]:
        while not self._over:
            action = rng.choice([rng.choice(ACTIONS), self.oracle() or rng.choice(ACTIONS)])
            yield action
            yield str(self.step(action)[0])

    def _page(self) -> str:
        return "\n".join(
            [self.heading, *("".join(f" {cell}" for cell in row) for row in self.rows())]
        )

    def _info(self, *, invalid: bool = False) -> dict[str, Any]:
        return {
            "available_actions": list(ACTIONS),
            "invalid_action": invalid,
            "success": self.solved,
        }


def moved(cell: Cell, action: str) -> Cell:
    """Return the neighbour of ``cell`` in the direction ``action``; it can be outside the grid."""
    row, column = MOVES[action]
    return cell[0] + row, cell[1] + column


def _split(name: object) -> Split:
    if not isinstance(name, str) or name not in SPLITS:
        raise ValueError(f"split {name!r} is not one of {', '.join(SPLITS)}")
    return SPLITS[name]


def _bucket(level: str) -> int:
    return int.from_bytes(blake2b(level.encode(), digest_size=8).digest(), "little") % 10
