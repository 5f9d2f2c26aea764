"""The weighted sum of the environment's return and its success.

Takes: one episode's request. Gives: ``return_weight * env_return + success_weight * success``.
Never: reads the conversation, or treats an unknown success as a failure.
"""

from __future__ import annotations

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_rewards.config import EnvReturnConfig


class EnvReturn(Reward):
    """Weight return and success.

    Args:
        return_weight: Weight of the sum of the environment's rewards.
        success_weight: Weight of success, 1 or 0.

    Raises:
        ValueError: If a weight is negative or not finite.
    """

    def __init__(self, *, return_weight: float = 1.0, success_weight: float = 0.0) -> None:
        self.config = EnvReturnConfig(return_weight=return_weight, success_weight=success_weight)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If success has a weight and the environment does not report it.
        """
        components = {"return": self.config.return_weight * request.env_return}
        if self.config.success_weight > 0:
            if request.success is None:
                raise ValueError(
                    f"{request.env_id} returned no info['success']; set success_weight to 0"
                )
            components["success"] = self.config.success_weight * request.success
        return RewardResult(sum(components.values()), components)
