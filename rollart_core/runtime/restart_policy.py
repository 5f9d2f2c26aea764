"""How often, and after how long, a dead part is started again.

Takes: the times at which a part died. Gives: seconds to wait, or None: it is given up. Never: reads
a clock or starts anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_DELAY_S = 0.5
"""Before the second restart of a window; the first one is at once."""
LONGEST_DELAY_S = 30.0


@dataclass(slots=True)
class Restarts:
    """The deaths of one part.

    Args:
        most: Restarts within a window; one more death and the part is given up.
        window_s: Seconds after which a death no longer counts.
    """

    most: int
    window_s: float
    deaths: list[float] = field(default_factory=list)
    """Seconds, of those that count."""

    def died(self, now_s: float) -> float | None:
        """Take note of a death; returns seconds to wait before the restart, None for no restart."""
        self.deaths = [t for t in self.deaths if now_s - t < self.window_s] + [now_s]
        if len(self.deaths) > self.most:
            return None
        if len(self.deaths) == 1:
            return 0.0
        doubled: float = FIRST_DELAY_S * 2 ** (len(self.deaths) - 2)
        return min(LONGEST_DELAY_S, doubled)
