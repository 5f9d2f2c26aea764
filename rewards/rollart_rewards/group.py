"""Rewards that compare siblings: rank, length and diversity within the group.

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
    """The share of its siblings that a member beats, a tie counting half.

    It is what is left of a reward whose size means nothing, only its order. A member without
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
        """Return a group with a tie, where nothing but the return counts."""
        if self._of:
            return self._of.as_groups()
        group = tuple(asked("x", env_return=value) for value in (0.2, 0.9, 0.2))
        return (RewardExample(group, (0.25, 1.0, 0.25)),)

    def close(self) -> None:
        """Close the reward that ranks; may be called twice."""
        if self._of:
            self._of.close()


class GroupLength(GroupReward):
    """Shorter is better among siblings, and nobody is paid for being short and wrong.

    The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3), in tokens of the policy:
    ``0.5 - (length - shortest) / (longest - shortest)`` for who was right, at most 0 for the
    others; 0 for all where all are equally long.

    Args:
        options: The fields of :class:`GroupLengthConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = config = GroupLengthConfig.model_validate(options)
        self._right = InnerReward(config.right, config.right.id) if config.right else None

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members.

        Raises:
            ValueError: When the environment does not say who was right, and nobody else does.
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
        """Return a group of which one was wrong and short, where nobody else says who was right."""
        if self._right:
            return self._right.as_groups()
        said = ((10, True), (30, True), (10, False))
        group = tuple(asked("x", num_loss_tokens=n, success=right) for n, right in said)
        return (RewardExample(group, (0.5, -0.5, 0.0)),)

    def close(self) -> None:
        """Close the reward that says who was right; may be called twice."""
        if self._right:
            self._right.close()

    def _who_was_right(self, requests: Sequence[RewardRequest]) -> list[bool]:
        if self._right:
            return [r.value >= self.config.right_from for r in self._right.score_all(requests)]
        if any(request.success is None for request in requests):
            env_id = requests[0].env_id
            raise ValueError(f"{env_id} gave no info['success']; say with `right` who was right")
        return [bool(request.success) for request in requests]


class GroupDiversity(GroupReward):
    """How unlike its siblings' an answer is: the mean distance to them.

    The distance of two texts is their Indel distance (insertions and deletions) as a share of both
    lengths: 0 for equal texts, 1 for texts without a letter in common. A member without siblings
    gets 1.

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
        """Return a group of two of a kind and one stranger, where the whole message counts."""
        group = tuple(asked(text) for text in ("ab", "ab", "cd"))
        values = (0.5, 0.5, 1.0) if self.config.answer == "message" else None
        return (RewardExample(group, values),)


def _share_beaten(value: float, values: Sequence[float]) -> float:
    """Return the share of the others that ``value``, one of them, beats; ties count half."""
    if len(values) < 2:
        return 0.5
    below = sum(other < value for other in values)
    alike = sum(other == value for other in values) - 1
    return (below + alike / 2) / (len(values) - 1)
