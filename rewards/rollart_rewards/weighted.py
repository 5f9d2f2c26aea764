"""A weighted sum of several rewards.

Takes: one episode's request, or those of a group. Gives: the sum of weight times value, and the
value of every part as a component. Never: adds a value that is outside the range of its part, or
leaves out a part that failed: the whole reward fails then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.config_parts import WeightedConfig, WeightedGroupConfig
from rollart_rewards.parts import WeightedParts

MOST: Final = 10_000.0
"""Largest absolute value of the sum: the range that the manifest declares."""


class _OfParts:
    """Common base of both weighted rewards."""

    _parts: WeightedParts

    def examples(self) -> Sequence[RewardExample]:
        """Return requests that all parts can score."""
        return self._parts.examples()

    def close(self) -> None:
        """Close the parts; can be called twice."""
        self._parts.close()


class Weighted(_OfParts, Reward):
    """A weighted sum of rewards that score one episode each; see the module.

    Args:
        options: The fields of :class:`WeightedConfig`.

    Raises:
        UserError: If a part cannot be built.
        ValueError: If the sum can leave the range.
    """

    def __init__(self, **options: object) -> None:
        self._parts = WeightedParts(WeightedConfig.model_validate(options).parts, MOST)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        return self._parts.score(request)


class WeightedGroup(_OfParts, GroupReward):
    """A weighted sum of rewards of which some score the whole group; see the module.

    Args:
        options: The fields of :class:`WeightedGroupConfig`.

    Raises:
        UserError: If a part cannot be built.
        ValueError: If the sum can leave the range.
    """

    def __init__(self, **options: object) -> None:
        self._parts = WeightedParts(WeightedGroupConfig.model_validate(options).parts, MOST)

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members."""
        return self._parts.score_all(requests)
