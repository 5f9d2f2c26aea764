"""Several rewards, weighed and added.

Takes: one episode's request, or those of a group. Gives: the sum of weight times value, and every
part's value as a component. Never: adds what a part has said outside its own range, or leaves out a
part that failed: then the whole has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.config_parts import WeightedConfig, WeightedGroupConfig
from rollart_rewards.parts import WeightedParts

MOST: Final = 100.0
"""Largest absolute value of the sum: the range that the manifest declares."""


class _OfParts:
    """What both have beside their way of scoring."""

    _parts: WeightedParts

    def examples(self) -> Sequence[RewardExample]:
        """Return requests that all parts can score."""
        return self._parts.examples()

    def close(self) -> None:
        """Close the parts; may be called twice."""
        self._parts.close()


class Weighted(_OfParts, Reward):
    """Rewards that each score one episode; see the module.

    Args:
        options: The fields of :class:`WeightedConfig`.

    Raises:
        UserError: When a part cannot be built.
        ValueError: When the sum could leave the range.
    """

    def __init__(self, **options: object) -> None:
        self._parts = WeightedParts(WeightedConfig.model_validate(options).parts, MOST)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        return self._parts.score(request)


class WeightedGroup(_OfParts, GroupReward):
    """Rewards of which some see the whole group; see the module.

    Args:
        options: The fields of :class:`WeightedGroupConfig`.

    Raises:
        UserError: When a part cannot be built.
        ValueError: When the sum could leave the range.
    """

    def __init__(self, **options: object) -> None:
        self._parts = WeightedParts(WeightedGroupConfig.model_validate(options).parts, MOST)

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members."""
        return self._parts.score_all(requests)
