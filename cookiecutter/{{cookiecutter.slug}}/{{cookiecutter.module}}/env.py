"""The environment: a maze that is described in text.

An action is one word: `up`, `down`, `left` or `right`. A step returns the next observation, and the
reward 1 at the exit. Any other action, and a move into a wall, uses up a turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from rollart_core.spaces import Text

from {{ cookiecutter.module }}.config import {{ cookiecutter.base }}Config
from {{ cookiecutter.module }}.maze import MOVES, Cell, Maze, after, draw_maze, where

NUM_TASKS = {"train": 10_000, "test": 1_000}
HINT = "You are in a maze. Find the exit: answer up, down, left or right.\n"


class {{ cookiecutter.class_name }}(gymnasium.Env[str, str]):
    """A maze. The agent sees the open moves and the direction of the exit.

    Args:
        options: The fields of {{ cookiecutter.base }}Config.
    """

    def __init__(self, **options: Any) -> None:
        self.config = {{ cookiecutter.base }}Config(**options)
        self.observation_space = Text()
        self.action_space = Text()
        self._maze: Maze | None = None
        self._cell: Cell = (0, 0)
        self._solution: list[str] = []
        self._turn = 0
        self._over = True

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        if split not in NUM_TASKS:
            raise ValueError(f"split {split!r} is not one of {', '.join(NUM_TASKS)}")
        return NUM_TASKS[split]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the task of `options` (`task`, `split`), or one drawn with the seed."""
        super().reset(seed=seed)
        options = options or {}
        split = options.get("split", "train")
        task = options.get("task")
        if task is None:
            task = int(self.np_random.integers(self.num_tasks(split)))
        if not 0 <= task < self.num_tasks(split):
            raise ValueError(f"task {task} is not in split {split!r} of {self.num_tasks(split)}")
        config = self.config
        self._maze = draw_maze(
            split, task, config.size, config.wall_probability, limit=config.max_turns
        )
        self._cell, self._turn, self._over = self._maze.start, 0, False
        self._solution = self._maze.way_out(self._cell) or []
        return (HINT if config.hint else "") + self._page(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move, or stay if the action is not an open move."""
        if self._maze is None or self._over:
            raise RuntimeError("there is no episode: call reset() first")
        move = action.strip().lower()
        valid = move in MOVES
        if valid and move in self._maze.open_moves(self._cell):
            self._cell = after(self._cell, move)
        self._turn += 1
        terminated = self._cell == self._maze.exit
        truncated = not terminated and self._turn >= self.config.max_turns
        self._over = terminated or truncated
        reward = 1.0 if terminated else 0.0
        return self._page(), reward, terminated, truncated, self._info(invalid=not valid)

    def close(self) -> None:
        """End the episode. There are no other resources."""
        self._maze = None

    def oracle(self) -> str | None:
        """Return the expert's next move, for warm starts and checks."""
        if self._maze is None:
            return None
        way = self._maze.way_out(self._cell)
        return way[0] if way else None

    def secrets(self) -> Sequence[str]:
        """Return texts that no observation may contain: the whole solution."""
        return [" ".join(self._solution)]

    def corpus(self) -> Iterator[str]:
        """Yield observations and moves, for the tokenizer of a new model."""
        for task in range(200):
            page, _ = self.reset(options={"task": task, "split": "train"})
            yield page
            while not self._over and (move := self.oracle()) is not None:
                yield move
                yield self.step(move)[0]

    def _page(self) -> str:
        assert self._maze is not None
        ways = " ".join(self._maze.open_moves(self._cell))
        return f"exit {where(self._cell, self._maze.exit)}\nopen {ways}"

    def _info(self, *, invalid: bool = False) -> dict[str, Any]:
        assert self._maze is not None
        return {
            "available_actions": self._maze.open_moves(self._cell),
            "invalid_action": invalid,
            "success": self._cell == self._maze.exit,
            "reward_components": {"detours": max(0, self._turn - len(self._solution))},
        }
