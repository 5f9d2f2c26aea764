"""A reward: the environment's return, less a cost for each turn."""

from __future__ import annotations

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult

from {{ cookiecutter.module }}.config import {{ cookiecutter.class_name }}Config


class {{ cookiecutter.class_name }}(Reward):
    """The return, scaled down by `turn_cost` for each turn, and limited to 0 to 1.

    An episode without a return gets 0, so that the policy does not learn to give up early.

    Args:
        turn_cost: Cost of each turn.
    """

    def __init__(self, *, turn_cost: float = 0.02) -> None:
        self.config = {{ cookiecutter.class_name }}Config(turn_cost=turn_cost)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode. Raise an error if it cannot be scored: 0 means a bad episode."""
        earned = min(1.0, max(0.0, request.env_return))
        share = max(0.0, 1.0 - self.config.turn_cost * request.num_turns)
        return RewardResult(earned * share, {"earned": earned, "turns": float(request.num_turns)})
