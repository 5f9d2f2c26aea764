"""FrozenLake as text: Gymnasium's lake, a new one for each task.

Takes: ``left``, ``down``, ``right`` or ``up``. Gives: the lake, 1 at the goal and 0 elsewhere.
Never: draws a lake whose goal cannot be reached. It moves like Gymnasium's ``FrozenLakeEnv`` (a
test compares them). It does not use that class, whose transition table would cost more than the
episode.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import ClassVar

from rollart_envs.toy.config import FrozenLakeConfig
from rollart_envs.toy.grid import ACTIONS, Cell, GridEnv, moved

START, FROZEN, HOLE, GOAL, PLAYER = "SFHGP"


class FrozenLakeEnv(GridEnv):
    """Walk from the top left to the bottom right without falling into a hole.

    Args:
        size: Cells along each side.
        slippery: Whether a move goes as asked only a third of the time.
        hole_probability: Probability that a cell is a hole.
        max_turns: Turns after which an episode is truncated.
        hint: Explain letters and moves on the first page.

    Raises:
        ValueError: If an option is outside its range.
    """

    heading: ClassVar[str] = "lake"
    explanation: ClassVar[str] = (
        "Walk P over frozen F to the goal G, not into a hole H: left, down, right or up."
    )

    def __init__(
        self,
        *,
        size: int = 4,
        slippery: bool = False,
        hole_probability: float = 0.2,
        max_turns: int = 20,
        hint: bool = True,
    ) -> None:
        self.config = FrozenLakeConfig(
            size=size,
            slippery=slippery,
            hole_probability=hole_probability,
            max_turns=max_turns,
            hint=hint,
        )
        super().__init__(hint=hint, max_turns=max_turns)
        self._lake: list[str] = []
        self._player: Cell = (0, 0)

    def draw(self, rng: random.Random) -> str | None:
        """Draw a lake; None if no path leads to its goal."""
        size, chance = self.config.size, self.config.hole_probability
        cells = [HOLE if rng.random() < chance else FROZEN for _ in range(size * size)]
        cells[0], cells[-1] = START, GOAL
        lake = ["".join(cells[row * size : (row + 1) * size]) for row in range(size)]
        return "\n".join(lake) if _distances(lake).get((0, 0)) is not None else None

    def load(self, level: str) -> None:
        """Start at the start of a lake."""
        self._lake = level.split("\n")
        self._player = (0, 0)

    def move(self, action: str) -> tuple[float, bool]:
        """Walk, or slip; the player cannot leave the lake."""
        if self.config.slippery:
            turn = int(self.np_random.integers(-1, 2))
            action = ACTIONS[(ACTIONS.index(action) + turn) % 4]
        self._player = _walk(self._lake, self._player, action)
        cell = self._cell
        return float(cell == GOAL), cell in (GOAL, HOLE)

    def rows(self) -> list[str]:
        """Return the lake with the player in it; the start is shown as frozen."""
        rows = [row.replace(START, FROZEN) for row in self._lake]
        row, column = self._player
        rows[row] = rows[row][:column] + PLAYER + rows[row][column + 1 :]
        return rows

    @property
    def solved(self) -> bool:
        """Whether the player is on the goal."""
        return self._cell == GOAL

    def oracle(self) -> str | None:
        """Return the first move of a shortest path (as if the ice was not slippery)."""
        distances = _distances(self._lake)
        here = distances.get(self._player, 0)
        if here == 0:
            return None
        step_to = partial(_walk, self._lake, self._player)
        return next(a for a in ACTIONS if distances.get(step_to(a)) == here - 1)

    @property
    def _cell(self) -> str:
        return self._lake[self._player[0]][self._player[1]]


def _walk(lake: list[str], cell: Cell, action: str) -> Cell:
    row, column = moved(cell, action)
    inside = 0 <= row < len(lake) and 0 <= column < len(lake)
    return (row, column) if inside else cell


def _distances(lake: list[str]) -> dict[Cell, int]:
    """Return the number of moves to the goal from every cell with a path, except holes."""
    goal = (len(lake) - 1, len(lake) - 1)
    distances, queue = {goal: 0}, deque([goal])
    while queue:
        cell = queue.popleft()
        for action in ACTIONS:
            near = _walk(lake, cell, action)
            if near not in distances and lake[near[0]][near[1]] != HOLE:
                distances[near] = distances[cell] + 1
                queue.append(near)
    return distances
