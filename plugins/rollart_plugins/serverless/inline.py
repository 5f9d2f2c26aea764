"""Reward functions in threads of the controller's process.

Takes: reward requests. Gives: results that are finite and in the declared range. Never: returns 0
for a reward that failed, or runs more than ``max_concurrent`` calls concurrently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rollart_core.contracts.reward import (
    GroupReward,
    Reward,
    RewardAnswer,
    RewardBackend,
    RewardCall,
    RewardCost,
    RewardRequest,
    RewardResult,
)
from rollart_core.contracts.reward_check import result_problem
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure, boundary
from rollart_core.rollout.threads import DaemonThreads
from rollart_plugins.serverless.function import close_reward
from rollart_plugins.serverless.wire import Outcome

T = TypeVar("T")


class InlineBackend(RewardBackend):
    """Runs one reward function in threads.

    Args:
        reward: The reward function.
        reward_range: Smallest and largest value that it can return.
        timeout_s: Maximum seconds for one call; a thread that hangs longer is abandoned.
        max_concurrent: Maximum number of concurrent calls. The time of a waiting call starts later.
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
        """Score each request; a group reward receives all of them in one call.

        Raises:
            RewardFailure: If the reward raised, or returned an invalid result.
            DeadlineFailure: If a call took too long.
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

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call: requests fail individually, and none waits past the call's deadline.

        Raises:
            BackendFailure: If the backend is closed.
        """
        if self._closed:
            raise BackendFailure("the reward backend is closed", again=False)
        began = time.perf_counter()
        if isinstance(self._reward, GroupReward):
            results = await self._whole(call)
        else:
            each = (self._one(request, call.deadline_s) for request in call.requests)
            results = tuple(await asyncio.gather(*each))
        return RewardAnswer(results, RewardCost(cold=False, run_s=time.perf_counter() - began))

    @property
    def num_hung(self) -> int:
        """Number of threads that a timed-out reward still occupies."""
        return self._threads.num_hung

    async def close(self) -> None:
        """Accept no more requests, and close the reward; can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        await close_reward(self._reward)

    async def _one(self, request: RewardRequest, deadline_s: float) -> Outcome:
        try:
            async with asyncio.timeout(deadline_s):
                return (await self.score((request,)))[0]
        except TimeoutError:
            return _late(deadline_s)
        except (RewardFailure, DeadlineFailure) as e:
            return e

    async def _whole(self, call: RewardCall) -> tuple[Outcome, ...]:
        failure: Outcome
        try:
            async with asyncio.timeout(call.deadline_s):
                return tuple(await self.score(call.requests))
        except TimeoutError:
            failure = _late(call.deadline_s)
        except (RewardFailure, DeadlineFailure) as e:
            failure = e
        return (failure,) * len(call.requests)

    async def _call(self, function: Callable[[], T]) -> T:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    with boundary(RewardFailure, "reward.score"):
                        return await self._threads.run(function)
            except TimeoutError as e:
                raise _late(self._timeout_s) from e

    def _checked(self, result: object) -> RewardResult:
        if problem := result_problem(result, self._range):
            raise RewardFailure(f"reward.score answered {problem}", boundary="reward.score")
        assert isinstance(result, RewardResult)
        return result


def _late(limit_s: float) -> DeadlineFailure:
    message = f"reward.score took longer than {limit_s:g} s"
    return DeadlineFailure(message, boundary="reward.score")
