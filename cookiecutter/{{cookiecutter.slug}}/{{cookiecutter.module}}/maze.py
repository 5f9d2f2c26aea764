"""Mazes: generated from a seed, solved with breadth-first search."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

Cell = tuple[int, int]
"""Row and column, from 0 at the top left."""

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SHORTEST = 3
"""The minimum number of moves to solve a maze."""


@dataclass(frozen=True)
class Maze:
    """The walkable cells, the start and the exit."""

    floor: frozenset[Cell]
    start: Cell
    exit: Cell

    def open_moves(self, cell: Cell) -> list[str]:
        """Return the moves that are not blocked by a wall."""
        return [move for move in MOVES if after(cell, move) in self.floor]

    def way_out(self, cell: Cell) -> list[str] | None:
        """Return a shortest list of moves from a cell to the exit, or None."""
        ways: dict[Cell, list[str]] = {cell: []}
        queue = deque([cell])
        while queue:
            here = queue.popleft()
            if here == self.exit:
                return ways[here]
            for move in self.open_moves(here):
                there = after(here, move)
                if there not in ways:
                    ways[there] = [*ways[here], move]
                    queue.append(there)
        return None


def after(cell: Cell, move: str) -> Cell:
    """Return the cell that a move leads to, even if it is a wall."""
    row, column = MOVES[move]
    return cell[0] + row, cell[1] + column


def draw_maze(split: str, index: int, size: int, wall_probability: float, limit: int) -> Maze:
    """Return the maze of a task. The splits have no maze in common.

    The shortest path to the exit has at least SHORTEST and at most `limit` moves.
    """
    rng = random.Random(f"{split} {index} {size} {wall_probability}")
    while True:
        cells = [(row, column) for row in range(size) for column in range(size)]
        floor = [cell for cell in cells if rng.random() >= wall_probability]
        if len(floor) < 2:
            continue
        start, exit_ = rng.sample(floor, 2)
        maze = Maze(frozenset(floor), start, exit_)
        way = maze.way_out(start)
        if way and SHORTEST <= len(way) <= limit and split_of(maze) == split:
            return maze


def split_of(maze: Maze) -> str:
    """Return the split of a maze, by its hash: one in five is in the test split."""
    text = repr((sorted(maze.floor), maze.start, maze.exit))
    return "test" if blake2b(text.encode(), digest_size=1).digest()[0] < 256 // 5 else "train"


def where(cell: Cell, goal: Cell) -> str:
    """Return the offset to the goal, such as "2 down 1 right"."""
    rows, columns = goal[0] - cell[0], goal[1] - cell[1]
    steps: Iterable[tuple[int, str]] = (
        (rows, "down"),
        (-rows, "up"),
        (columns, "right"),
        (-columns, "left"),
    )
    return " ".join(f"{number} {word}" for number, word in steps if number > 0) or "here"
