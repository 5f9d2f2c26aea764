"""The deadlines of groups, and whether all of them can be met.

Takes: deadlines, in policy versions. Gives: their counts, and the first deadline that cannot be
met. Never: uses the groups themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def first_excess(counts: Mapping[int, int], size: int, batch: int) -> tuple[int, int] | None:
    """Return the first deadline that cannot be met from ``batch`` on, and the excess groups."""
    total = 0
    for deadline in sorted(counts):
        total += counts[deadline]
        excess = total - size * max(0, deadline - batch + 1)
        if excess > 0:
            return deadline, excess
    return None


class StalenessBound:
    """The number of groups per deadline; at most ``max_staleness + 2`` different deadlines."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, deadline: int) -> None:
        """Add one group."""
        self.counts[deadline] += 1
        self._total += 1

    def remove(self, deadline: int) -> None:
        """Remove one group."""
        self._total -= 1
        self.counts[deadline] -= 1
        if not self.counts[deadline]:
            del self.counts[deadline]

    def move(self, old: int, new: int) -> None:
        """Change the deadline of one group."""
        self.remove(old)
        self.add(new)

    def earliest(self, n: int) -> Counter[int]:
        """Return the counts of the ``n`` groups with the earliest deadlines."""
        taken: Counter[int] = Counter()
        for deadline in sorted(self.counts):
            taken[deadline] = min(n, self.counts[deadline])
            n -= taken[deadline]
        return taken

    def without(self, taken: Counter[int]) -> Counter[int]:
        """Return the counts minus ``taken``."""
        return self.counts - taken
