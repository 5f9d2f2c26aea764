"""A reward: the environment's return, less something for each turn it took."""

from __future__ import annotations

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult

from {{ cookiecutter.module }}.config import {{ cookiecutter.class_name }}Config


class {{ cookiecutter.class_name }}(Reward):
    """The return, times one less `turn_cost` for each turn; never below 0 or above 1.

    An episode that earned nothing gets nothing: a policy must not learn to give up early.

    Args:
        turn_cost: What each turn costs.
    """

    def __init__(self, *, turn_cost: float = 0.02) -> None:
        self.config = {{ cookiecutter.class_name }}Config(turn_cost=turn_cost)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode. Raise when it cannot be scored; 0 would mean that it was bad."""
        earned = min(1.0, max(0.0, request.env_return))
        share = max(0.0, 1.0 - self.config.turn_cost * request.num_turns)
        return RewardResult(earned * share, {"earned": earned, "turns": float(request.num_turns)})
