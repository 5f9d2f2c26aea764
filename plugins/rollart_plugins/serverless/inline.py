"""Reward functions in threads of the controller's own process.

Takes: reward requests. Gives: results that are finite and in the declared range. Never: answers 0
for a reward that failed, or runs more than ``max_concurrent`` calls at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rollart_core.contracts.reward import (
    GroupReward,
    Reward,
    RewardBackend,
    RewardRequest,
    RewardResult,
)
from rollart_core.errors import DeadlineFailure, RewardFailure, boundary
from rollart_core.rollout.threads import DaemonThreads

T = TypeVar("T")

_SLACK = 1e-6


class InlineBackend(RewardBackend):
    """Runs one reward function in threads.

    Args:
        reward: The reward function.
        reward_range: Smallest and largest value it may answer.
        timeout_s: Seconds one call may take; a thread that hangs longer is given up.
        max_concurrent: Most calls at once; the others wait, and their time does not run yet.
    """

    def __init__(
        self,
        reward: Reward | GroupReward,
        *,
        reward_range: tuple[float, float],
        timeout_s: float,
        max_concurrent: int = 32,
    ) -> None:
        self._reward = reward
        self._range = reward_range
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(max_concurrent, name="reward")
        self._slots = asyncio.Semaphore(max_concurrent)
        self._closed = False

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request; a group reward gets them all in one call.

        Raises:
            RewardFailure: When the reward raised, or answered outside its contract.
            DeadlineFailure: When a call took too long.
        """
        if self._closed:
            raise RewardFailure("the reward backend is closed", boundary="reward.score")
        if not requests:
            return []
        if isinstance(self._reward, GroupReward):
            results = await self._call(partial(self._reward.score_group, requests))
            if len(results) != len(requests):
                message = f"{len(results)} results for {len(requests)} requests"
                raise RewardFailure(message, boundary="reward.score_group")
        else:
            score = self._reward.score
            results = await asyncio.gather(*(self._call(partial(score, r)) for r in requests))
        return [self._checked(result) for result in results]

    async def close(self) -> None:
        """Take no more requests; may be called twice."""
        self._closed = True
        self._threads.close()

    async def _call(self, function: Callable[[], T]) -> T:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    with boundary(RewardFailure, "reward.score"):
                        return await self._threads.run(function)
            except TimeoutError as e:
                message = f"reward.score took longer than {self._timeout_s:g} s"
                raise DeadlineFailure(message, boundary="reward.score") from e

    def _checked(self, result: object) -> RewardResult:
        low, high = self._range
        problem = ""
        if not isinstance(result, RewardResult):
            problem = f"a {type(result).__name__}, not a RewardResult"
        elif not math.isfinite(result.value):
            problem = f"the value {result.value}"
        elif not low - _SLACK <= result.value <= high + _SLACK:
            problem = f"{result.value:g}, outside its range {low:g} to {high:g}"
        if problem:
            raise RewardFailure(f"reward.score answered {problem}", boundary="reward.score")
        assert isinstance(result, RewardResult)
        return result
