"""A reward that waits or computes, for benchmarks of reward backends.

Takes: a request, and a wait time or a number of steps. Gives: the environment's return. Never:
starts a thread or a process.
"""

from __future__ import annotations

import math
import time
from typing import Final

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult

ID: Final = f"{__name__}:WaitingReward"
_LONGEST: Final = 6.0
"""The longest wait, in means, so that the tail does not determine a benchmark's duration."""


class WaitingReward(Reward):
    """Waits or computes before it returns.

    Args:
        wait_s: Seconds, or their mean.
        spread: Whether waits have an exponential distribution. A wait depends only on the request,
            so that it is the same on every backend.
        steps: Number of steps of a loop in Python, which holds the interpreter, instead of a wait.
    """

    def __init__(self, *, wait_s: float, spread: bool = False, steps: int = 0) -> None:
        self._wait_s, self._spread, self._steps = wait_s, spread, steps

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        if self._steps:
            return RewardResult(request.env_return + 0.0 * sum(range(self._steps)))
        time.sleep(wait_of(request.task_index, self._wait_s) if self._spread else self._wait_s)
        return RewardResult(request.env_return)


def wait_of(index: int, mean_s: float) -> float:
    """Return the wait of a request: the quantile of its index, in an order without a trend."""
    place = (index * 0.6180339887498949 + 0.5) % 1.0
    return mean_s * min(_LONGEST, -math.log1p(-place))
