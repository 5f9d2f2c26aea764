"""A reward backend that does on demand whatever a backend can do wrong.

Takes: shares of calls that fail in each way, and spells in which nothing gets through. Gives: what
the reward itself answers, computed in this process, after a delay. Never: gets anywhere near a
network.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence

from rollart_core.contracts.reward import (
    GroupReward,
    RewardAnswer,
    RewardBackend,
    RewardCall,
    RewardCost,
    RewardRef,
    RewardRequest,
    RewardResult,
)
from rollart_core.errors import BackendFailure, RewardFailure, boundary
from rollart_core.plugins import registry


class FaultyBackend(RewardBackend):
    """See the module; by its path, ``rollart_testing:FaultyBackend``, a run can use it.

    Args:
        reward: Which reward.
        reward_range: Not looked at: the scoring room does that.
        timeout_s: Not looked at: it waits until it is cancelled.
        mean_s: Mean seconds of a call.
        sigma: Sigma of their logarithm; 0 makes all alike.
        errors: Share of calls that cannot be made.
        hangs: Share that is never answered.
        garbage: Share answered with what is no result.
        outage_s: Begin and end of a spell, in seconds from the first call on, in which none can be
            made.
        seed: Of what goes wrong.
    """

    def __init__(
        self,
        reward: RewardRef,
        *,
        reward_range: tuple[float, float],
        timeout_s: float,
        mean_s: float = 0.0,
        sigma: float = 0.0,
        errors: float = 0.0,
        hangs: float = 0.0,
        garbage: float = 0.0,
        outage_s: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        self._reward = registry.build("rewards", reward.id, reward.options)
        self._mean_s, self._sigma = mean_s, sigma
        self._shares = {"error": errors, "hang": hangs, "garbage": garbage}
        self._outage_s = tuple(outage_s)
        self._random = random.Random(seed)
        self._began_s: float | None = None
        self.calls: list[RewardCall] = []
        """All that it was asked."""
        self.num_now = self.num_most = 0
        """Calls under way: now, and at most."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request."""
        with boundary(RewardFailure, "reward.score"):
            if isinstance(self._reward, GroupReward):
                return self._reward.score_group(requests)
            return [self._reward.score(request) for request in requests]

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call, or do something wrong.

        Raises:
            BackendFailure: When that is what goes wrong.
        """
        self.calls.append(call)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await self._answer(call)
        finally:
            self.num_now -= 1

    def gauges(self) -> Mapping[str, float]:
        """Return how many calls are under way."""
        return {"calls_now": float(self.num_now)}

    async def close(self) -> None:
        """Nothing was started."""

    async def _answer(self, call: RewardCall) -> RewardAnswer:
        fault = self._fault()
        took_s = self._took_s()
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "error":
            raise BackendFailure("503: no instance is free")
        await asyncio.sleep(took_s)
        if fault == "garbage":
            raise BackendFailure("the answer is not JSON: '<html>'")
        cost = RewardCost(cold=len(self.calls) == 1, billed_gb_s=took_s, run_s=took_s)
        if call.group:
            return RewardAnswer(tuple(await self.score(call.requests)), cost)
        results = [await self._score_one(request) for request in call.requests]
        return RewardAnswer(tuple(results), cost)

    def _fault(self) -> str:
        """Return what goes wrong with this call; empty: nothing."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        if self._outage_s and self._outage_s[0] <= now_s - self._began_s < self._outage_s[1]:
            return "error"
        drawn = self._random.random()
        for kind, share in self._shares.items():
            if drawn < share:
                return kind
            drawn -= share
        return ""

    def _took_s(self) -> float:
        if not self._mean_s or not self._sigma:
            return self._mean_s
        mu = math.log(self._mean_s) - self._sigma**2 / 2
        return self._random.lognormvariate(mu, self._sigma)
