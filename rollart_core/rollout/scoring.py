"""From a finished episode to its reward, through whichever backend runs the reward function.

Takes: a resolved reward, or None for the environment's own return. Gives: an awaitable scorer.
Never: turns an error into a number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollart_core import registry
from rollart_core.contracts.reward import RewardBackend, RewardRequest, RewardResult, RewardSpec
from rollart_core.resolve import ResolvedPlugin

Scorer = Callable[[RewardRequest], Awaitable[RewardResult]]
DEFAULT_BACKEND = "inline"


def scorer(reward: ResolvedPlugin[RewardSpec] | None, *, timeout_s: float) -> Scorer:
    """Return what scores a request.

    Args:
        reward: The reward function; None: the environment's own return is the reward.
        timeout_s: Deadline of one scoring.
    """
    if reward is None:
        return _env_return
    backend: RewardBackend = registry.build(
        "reward_backends",
        DEFAULT_BACKEND,
        reward=reward.build(),
        reward_range=reward.spec.reward_range,
        timeout_s=timeout_s,
    )

    async def score(request: RewardRequest) -> RewardResult:
        return (await backend.score([request]))[0]

    return score


async def _env_return(request: RewardRequest) -> RewardResult:
    return RewardResult(request.env_return)
