"""Rewards that compare siblings by rank, length or diversity within the group.

Takes: the requests of one group, in order. Gives: one result for each. Never: compares across
groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from rapidfuzz.distance import Indel

from rollart_core.contracts.reward import GroupReward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.answer import answer_part
from rollart_rewards.config import GroupDiversityConfig
from rollart_rewards.config_parts import GroupLengthConfig, GroupRankConfig
from rollart_rewards.examples import asked
from rollart_rewards.parts import InnerReward


class GroupRank(GroupReward):
    """The share of its siblings that a member beats; a tie counts half.

    Use it for a reward of which only the order is meaningful, not the size. A member without
    siblings gets 0.5.

    Args:
        options: The fields of :class:`GroupRankConfig`.
    """

    def __init__(self, **options: object) -> None:
        config = GroupRankConfig.model_validate(options)
        self._of = InnerReward(config.of, config.of.id) if config.of else None

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members."""
        values = (
            [r.value for r in self._of.score_all(requests)]
            if self._of
            else [request.env_return for request in requests]
        )
        return [RewardResult(_share_beaten(v, values), {"ranked": v}) for v in values]

    def examples(self) -> Sequence[RewardExample]:
        """Return a group with a tie, scored by the return only."""
        if self._of:
            return self._of.as_groups()
        group = tuple(asked("x", env_return=value) for value in (0.2, 0.9, 0.2))
        return (RewardExample(group, (0.25, 1.0, 0.25)),)

    def close(self) -> None:
        """Close the reward that ranks; can be called twice."""
        if self._of:
            self._of.close()


class GroupLength(GroupReward):
    """Shorter is better among siblings, but a short wrong answer gains nothing.

    The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3), in tokens of the policy:
    ``0.5 - (length - shortest) / (longest - shortest)`` for right answers, at most 0 for the
    others; 0 for all if all have the same length.

    Args:
        options: The fields of :class:`GroupLengthConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = config = GroupLengthConfig.model_validate(options)
        self._right = InnerReward(config.right, config.right.id) if config.right else None

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members.

        Raises:
            ValueError: If neither the environment nor ``right`` decides which answers are right.
        """
        lengths = [request.num_loss_tokens for request in requests]
        shortest, spread = (
            min(lengths, default=0),
            max(lengths, default=0) - min(lengths, default=0),
        )
        results = []
        for length, is_right in zip(lengths, self._who_was_right(requests), strict=True):
            value = 0.5 - (length - shortest) / spread if spread else 0.0
            value = value if is_right else min(0.0, value)
            parts = {"length": float(length), "right": float(is_right)}
            results.append(RewardResult(value, parts))
        return results

    def examples(self) -> Sequence[RewardExample]:
        """Return a group with one short wrong answer, unless ``right`` decides what is right."""
        if self._right:
            return self._right.as_groups()
        said = ((10, True), (30, True), (10, False))
        group = tuple(asked("x", num_loss_tokens=n, success=right) for n, right in said)
        return (RewardExample(group, (0.5, -0.5, 0.0)),)

    def close(self) -> None:
        """Close the reward that decides which answers are right; can be called twice."""
        if self._right:
            self._right.close()

    def _who_was_right(self, requests: Sequence[RewardRequest]) -> list[bool]:
        if self._right:
            return [r.value >= self.config.right_from for r in self._right.score_all(requests)]
        if any(request.success is None for request in requests):
            env_id = requests[0].env_id
            raise ValueError(f"{env_id} returned no info['success']; set `right` to a reward")
        return [bool(request.success) for request in requests]


class GroupDiversity(GroupReward):
    """The diversity of an answer: its mean distance to the answers of its siblings.

    The distance of two texts is their Indel distance (insertions and deletions) divided by the sum
    of their lengths: 0 for equal texts, 1 for texts without a common letter. A member without
    siblings gets 1.

    Args:
        options: The fields of :class:`GroupDiversityConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = GroupDiversityConfig.model_validate(options)

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members."""
        config = self.config
        said = [answer_part(request.answer, config.answer) or "" for request in requests]
        said = [" ".join(text.split())[: config.max_chars] for text in said]
        results = []
        for index, text in enumerate(said):
            others = said[:index] + said[index + 1 :]
            apart = [Indel.normalized_distance(text, other) for other in others]
            results.append(RewardResult(sum(apart) / len(apart) if apart else 1.0))
        return results

    def examples(self) -> Sequence[RewardExample]:
        """Return a group of two equal answers and a different one, with values if known."""
        group = tuple(asked(text) for text in ("ab", "ab", "cd"))
        values = (0.5, 0.5, 1.0) if self.config.answer == "message" else None
        return (RewardExample(group, values),)


def _share_beaten(value: float, values: Sequence[float]) -> float:
    """Return the share of the other values that ``value`` is above; ties count half."""
    if len(values) < 2:
        return 0.5
    below = sum(other < value for other in values)
    alike = sum(other == value for other in values) - 1
    return (below + alike / 2) / (len(values) - 1)
