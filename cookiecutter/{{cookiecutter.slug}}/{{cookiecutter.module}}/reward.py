"""A reward: the environment's return, less something for each turn that was a detour."""

from __future__ import annotations

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult

from {{ cookiecutter.module }}.config import {{ cookiecutter.base }}RewardConfig


class {{ cookiecutter.base }}Reward(Reward):
    """The return, less `detour_cost` for each turn beyond the shortest way; never below 0.

    Args:
        detour_cost: What each such turn costs.
    """

    def __init__(self, *, detour_cost: float = 0.05) -> None:
        self.config = {{ cookiecutter.base }}RewardConfig(detour_cost=detour_cost)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        detours = request.components.get("detours", 0.0)
        share = max(0.0, 1.0 - self.config.detour_cost * detours)
        return RewardResult(request.env_return * share, {"detours": detours})
