"""The scaling policy, which decides when engines and env workers join and leave.

    pressure high for hold_s -> one more     pressure low for hold_s -> one fewer
    after either: no change for cool_s; the count stays between min and max

Takes: the load of engines and env workers, and the time. Gives: the wanted number of workers.
Never: reads a clock, or starts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart_core.config.runtime import EngineScaling, EnvScaling


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """The load of one engine."""

    kv_used: float
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Whether there are too few workers (high) or more than needed (low); else no change."""

    high: bool
    low: bool


def engine_pressure(limits: EngineScaling, loads: Sequence[ClusterLoad]) -> Pressure:
    """Return the pressure on the engines that are up.

    It is low only if the KV cache of all engines fits into one engine fewer with margin. Otherwise
    the next check would scale up again.
    """
    if not loads:
        return Pressure(high=False, low=False)
    kv_used = sum(load.kv_used for load in loads)
    waiting = sum(load.num_waiting for load in loads)
    mean_kv = kv_used / len(loads)
    high = mean_kv >= limits.kv_above or waiting / len(loads) >= limits.waiting_above
    fewer = max(1, len(loads) - 1)
    low = waiting == 0 and mean_kv <= limits.kv_below and kv_used / fewer < limits.kv_above
    return Pressure(high, low and not high)


def env_pressure(limits: EnvScaling, num_episodes: int, num_workers: int) -> Pressure:
    """Return the pressure on the env workers, from their number of episodes."""
    high = num_episodes / num_workers >= limits.episodes_above
    fewer = max(1, num_workers - 1)
    low = num_episodes / num_workers <= limits.episodes_below
    return Pressure(high, low and not high and num_episodes / fewer < limits.episodes_above)


@dataclass(slots=True)
class Scaler:
    """Decides the number of workers of one kind.

    Args:
        least: The minimum number.
        most: The maximum number.
        hold_s: Seconds that pressure must last before a change.
        cool_s: Seconds without a change after a change.
    """

    least: int
    most: int
    hold_s: float
    cool_s: float
    high_since_s: float | None = None
    low_since_s: float | None = None
    changed_s: float | None = None

    def decide(self, now_s: float, count: int, pressure: Pressure) -> int:
        """Return the wanted number of workers, from the current number and the pressure."""
        self.high_since_s = _since(self.high_since_s, pressure.high, now_s)
        self.low_since_s = _since(self.low_since_s, pressure.low, now_s)
        if self.changed_s is not None and now_s - self.changed_s < self.cool_s:
            return count
        wanted = count
        if self._lasted(self.high_since_s, now_s):
            wanted = min(self.most, count + 1)
        elif self._lasted(self.low_since_s, now_s):
            wanted = max(self.least, count - 1)
        if wanted != count:
            self.changed_s, self.high_since_s, self.low_since_s = now_s, None, None
        return wanted

    def _lasted(self, since_s: float | None, now_s: float) -> bool:
        return since_s is not None and now_s - since_s >= self.hold_s


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    """Return the time since which a condition holds; None if it does not hold."""
    if not holds:
        return None
    return now_s if since_s is None else since_s
