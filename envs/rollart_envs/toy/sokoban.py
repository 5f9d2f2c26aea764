"""Sokoban as text, with generated levels.

Takes: ``left``, ``down``, ``right`` or ``up``. Gives: the room, and 1 if every box is on its
target. Levels are made by playing backwards: boxes start on their targets and are pulled away, so
each level can be solved within ``max_turns``. Never: gives a level that cannot be solved.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import Any, ClassVar, TypeAlias

from rollart_envs.toy.config import SokobanConfig
from rollart_envs.toy.grid import ACTIONS, Cell, GridEnv, moved

Boxes: TypeAlias = frozenset[Cell]
State: TypeAlias = tuple[Cell, Boxes]

WALL, FLOOR, TARGET, BOX, DONE, PLAYER, ON_TARGET = "WFTBDPQ"


class SokobanEnv(GridEnv):
    """Push every box onto a target; a box can be pushed, not pulled, and only one at a time.

    Args:
        size: Cells along each side, without the surrounding wall.
        num_boxes: Number of boxes, and of targets.
        wall_probability: Probability that a cell is a wall.
        num_pulls: Maximum number of pulls that make the level from its solution.
        max_turns: Turns after which an episode is truncated.
        hint: Explain letters and moves on the first page.

    Raises:
        ValueError: If an option is outside its range.
    """

    heading: ClassVar[str] = "room"
    explanation: ClassVar[str] = (
        "You are P (Q on a target). Push each box B onto a target T (then D);"
        " W and the edge are walls: left, down, right or up."
    )

    def __init__(
        self,
        *,
        size: int = 4,
        num_boxes: int = 1,
        wall_probability: float = 0.1,
        num_pulls: int = 4,
        max_turns: int = 40,
        hint: bool = True,
    ) -> None:
        self.config = SokobanConfig(
            size=size,
            num_boxes=num_boxes,
            wall_probability=wall_probability,
            num_pulls=num_pulls,
            max_turns=max_turns,
            hint=hint,
        )
        super().__init__(hint=hint, max_turns=max_turns)
        self._size = size
        self._floor: Boxes = frozenset()
        self._targets: Boxes = frozenset()
        self._state: State = ((0, 0), frozenset())
        self._plan: list[str] = []

    def draw(self, rng: random.Random) -> str | None:
        """Draw a level; None if the room has separated parts or gives no level."""
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        floor = frozenset(c for c in cells if rng.random() >= self.config.wall_probability)
        if len(floor) < self.config.num_boxes + 2:
            return None
        *targets, player = rng.sample(sorted(floor), self.config.num_boxes + 1)
        if len(_walks(floor, frozenset(), player)) < len(floor):
            return None
        self._floor, self._targets = floor, frozenset(targets)
        state = self._pull_apart(rng, (player, self._targets))
        if state is None or state[1] & self._targets:
            return None
        self._state = state
        return "\n".join(self.rows())

    def load(self, level: str) -> None:
        """Start at the start of a level."""
        grid = {(r, c): x for r, row in enumerate(level.split("\n")) for c, x in enumerate(row)}
        self._floor = frozenset(c for c, letter in grid.items() if letter != WALL)
        self._targets = frozenset(c for c, x in grid.items() if x in (TARGET, DONE, ON_TARGET))
        boxes = frozenset(c for c, letter in grid.items() if letter in (BOX, DONE))
        player = next(c for c, letter in grid.items() if letter in (PLAYER, ON_TARGET))
        self._state = (player, boxes)
        self._plan = []

    def move(self, action: str) -> tuple[float, bool]:
        """Walk or push; walls, and boxes with no free cell behind them, do not move."""
        self._plan = self._plan[1:] if self._plan and self._plan[0] == action else []
        self._state = _push(self._floor, self._state, action)
        return float(self.solved), self.solved

    def rows(self) -> list[str]:
        """Return the room, one letter per cell."""
        size = range(self._size)
        return ["".join(self._letter((row, column)) for column in size) for row in size]

    @property
    def solved(self) -> bool:
        """Whether every box is on a target."""
        return self._state[1] == self._targets

    def oracle(self) -> str | None:
        """Return the first move of a shortest solution; None if the level is no longer solvable."""
        if not self._plan:
            self._plan = solve(self._floor, self._targets, self._state) or []
        return self._plan[0] if self._plan else None

    def _info(self, *, invalid: bool = False) -> dict[str, Any]:
        done = len(self._state[1] & self._targets) / len(self._targets)
        return {**super()._info(invalid=invalid), "reward_components": {"boxes_on_targets": done}}

    def _letter(self, cell: Cell) -> str:
        player, boxes = self._state
        target = cell in self._targets
        if cell not in self._floor:
            return WALL
        if cell in boxes:
            return DONE if target else BOX
        if cell == player:
            return ON_TARGET if target else PLAYER
        return TARGET if target else FLOOR

    def _pull_apart(self, rng: random.Random, solution: State) -> State | None:
        """Play backwards from ``solution``; None if the way back takes too many moves."""
        (player, boxes), num_moves = solution, 0
        seen = {boxes}
        for _ in range(self.config.num_pulls):
            walks = _walks(self._floor, boxes, player)
            pulls = [p for p in _pulls(self._floor, boxes, walks) if p[2] not in seen]
            if not pulls:
                break
            stand, player, boxes = rng.choice(pulls)
            num_moves += walks[stand] + 1
            seen.add(boxes)
        walks = _walks(self._floor, boxes, player)
        start = rng.choice(sorted(walks))
        return (start, boxes) if num_moves + walks[start] <= self.max_turns else None


def solve(floor: Boxes, targets: Boxes, start: State) -> list[str] | None:
    """Return a shortest list of moves that solves the level, by A*; None if there is none.

    The heuristic is the sum of each box's Manhattan distance to its nearest target.
    """
    came: dict[State, tuple[State, str] | None] = {start: None}
    cost = {start: 0}
    # The running number breaks ties, so that the plan does not depend on how sets compare.
    queue = [(_bound(start[1], targets), 0, start)]
    number = 0
    while queue:
        estimate, _, state = heapq.heappop(queue)
        if state[1] == targets:
            return _moves(came, state)
        if estimate > cost[state] + _bound(state[1], targets):
            continue
        for action in ACTIONS:
            after = _push(floor, state, action)
            if cost[state] + 1 < cost.get(after, 1 << 30):
                number += 1
                cost[after], came[after] = cost[state] + 1, (state, action)
                heapq.heappush(queue, (cost[after] + _bound(after[1], targets), number, after))
    return None


def _bound(boxes: Boxes, targets: Boxes) -> int:
    return sum(min(abs(b[0] - t[0]) + abs(b[1] - t[1]) for t in targets) for b in boxes)


def _moves(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    moves: list[str] = []
    while (step := came[state]) is not None:
        state, action = step
        moves.append(action)
    return moves[::-1]


def _push(floor: Boxes, state: State, action: str) -> State:
    player, boxes = state
    ahead = moved(player, action)
    if ahead not in floor:
        return state
    if ahead not in boxes:
        return ahead, boxes
    behind = moved(ahead, action)
    if behind not in floor or behind in boxes:
        return state
    return ahead, (boxes - {ahead}) | {behind}


def _walks(floor: Boxes, boxes: Boxes, player: Cell) -> dict[Cell, int]:
    """Return the number of moves to every cell that can be reached without pushing."""
    walks, queue = {player: 0}, deque([player])
    while queue:
        cell = queue.popleft()
        for action in ACTIONS:
            near = moved(cell, action)
            if near in floor and near not in boxes and near not in walks:
                walks[near] = walks[cell] + 1
                queue.append(near)
    return walks


def _pulls(floor: Boxes, boxes: Boxes, walks: dict[Cell, int]) -> list[tuple[Cell, Cell, Boxes]]:
    """Return every pull as (player before the pull, player after it, boxes after it)."""
    pulls = []
    for box in sorted(boxes):
        for action in ACTIONS:
            stand = moved(box, action)
            back = moved(stand, action)
            if stand in walks and back in floor and back not in boxes:
                pulls.append((stand, back, (boxes - {box}) | {stand}))
    return pulls
