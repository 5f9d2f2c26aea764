"""A stock clerk: two tool calls, one answer. The smallest environment with tools.

Takes: actions in the format of ``rollart_core.rollout.tools``. Gives: 1 for the right answer, 0 for
a wrong one or no answer in the episode. Never: shows the numbers in any other way than through its
tool.
"""

from __future__ import annotations

import random
from hashlib import blake2b

from rollart_core.rollout.tools import Call, ToolAction, ToolEnv, ToolError, ToolResult, tool

THINGS = ("shirts", "lamps", "cups", "hats", "bags", "chairs", "books", "bowls")
SPLITS = {"train": (0, 100_000), "warm": (1_000_000, 1_000), "test": (2_000_000, 1_000)}
"""First seed and number of tasks."""


class StockEnv(ToolEnv):
    """Answer which of two items there are more of, after looking up both.

    Args:
        most: Largest number of items in stock.

    Raises:
        ValueError: If an option is outside its range.
    """

    def __init__(self, *, most: int = 9) -> None:
        super().__init__()
        if not 1 <= most <= 999:
            raise ValueError(f"most is {most}; it must be 1 to 999")
        self._most = most
        self._asked: tuple[str, str] = ("", "")
        self._stock: dict[str, int] = {}

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return _split(split)[1]

    def begin(self, task: int, split: str, seed: int | None) -> str:
        """Draw the items and their numbers; only the task decides them."""
        first, num_tasks = _split(split)
        if not 0 <= task < num_tasks:
            raise ValueError(f"task {task} of split {split!r}, which has {num_tasks}")
        digest = blake2b(f"stock {first + task}".encode(), digest_size=8).digest()
        draw = random.Random(int.from_bytes(digest, "little"))
        one, other = draw.sample(THINGS, 2)
        counts = draw.sample(range(self._most + 1), 2)
        self._asked, self._stock = (one, other), dict(zip((one, other), counts, strict=True))
        self._known: dict[str, int] = {}
        return f"more {one} or {other}?"

    @tool
    def stock(self, item: str) -> str:
        """How many of an item there are."""
        if item not in self._stock:
            raise ToolError(f"no {item!r} here")
        self._known[item] = self._stock[item]
        return str(self._stock[item])

    def said(self, content: str) -> ToolResult:
        """Score the answer."""
        right = content.strip() == self._answer()
        return ToolResult("right" if right else "wrong", float(right), done=True, success=right)

    def oracle(self) -> str:
        """Look up both items in one turn, then answer."""
        if len(self._known) == len(self._asked):
            return ToolAction(self._answer()).text()
        return ToolAction("", tuple(Call("stock", {"item": item}) for item in self._asked)).text()

    def _answer(self) -> str:
        return max(self._asked, key=lambda item: self._stock[item])


def _split(split: str) -> tuple[int, int]:
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are: {', '.join(SPLITS)}")
    return SPLITS[split]
