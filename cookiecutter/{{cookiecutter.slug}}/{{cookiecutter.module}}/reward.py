"""A reward: the environment's return, less a cost for each detour."""

from __future__ import annotations

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult

from {{ cookiecutter.module }}.config import {{ cookiecutter.base }}RewardConfig


class {{ cookiecutter.base }}Reward(Reward):
    """The return, less `detour_cost` for each turn beyond the shortest path, at least 0.

    Args:
        detour_cost: Cost of each such turn.
    """

    def __init__(self, *, detour_cost: float = 0.05) -> None:
        self.config = {{ cookiecutter.base }}RewardConfig(detour_cost=detour_cost)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        detours = request.components.get("detours", 0.0)
        share = max(0.0, 1.0 - self.config.detour_cost * detours)
        return RewardResult(request.env_return * share, {"detours": detours})
