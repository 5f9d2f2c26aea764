"""A reward backend: each score in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollart_core.contracts.reward import Reward, RewardBackend, RewardRequest, RewardResult
from rollart_core.errors import RewardFailure, boundary


class Threads(RewardBackend):
    """Built around the reward object, as every backend of version 1 is."""

    def __init__(
        self, *, reward: Reward, reward_range: tuple[float, float], timeout_s: float
    ) -> None:
        self._reward = reward
        self._timeout_s = timeout_s

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request."""
        with boundary(RewardFailure, "reward.score"):
            async with asyncio.timeout(self._timeout_s):
                threads = (asyncio.to_thread(self._reward.score, r) for r in requests)
                return list(await asyncio.gather(*threads))

    async def close(self) -> None:
        """There is nothing to stop."""
