"""Which of its siblings does a model prefer a member to?

Takes: the requests of one group. Gives: for each the share of its pairs that it wins, a tie (or a
judge who changes his mind with the order) counting half. Never: asks in one order alone, or scores
a group of which one pair could not be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rollart_core.contracts.reward import GroupReward, RewardRequest, RewardResult
from rollart_rewards.config_judges import JudgeGroupConfig
from rollart_rewards.judge import COMPARE_SYSTEM, AsksJudge, comparison, cut, talk


class JudgeGroup(AsksJudge[JudgeGroupConfig], GroupReward):
    """Compares siblings in pairs; see the module. A member without siblings gets 0.5.

    Args:
        options: The fields of :class:`JudgeGroupConfig`.

    Raises:
        ConfigError: When there is no such server's URL, or no key.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(JudgeGroupConfig.model_validate(options))

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members.

        Raises:
            EndpointError: When the judge cannot be asked.
            ValueError: When an answer cannot be read, several times over.
        """
        texts = [self._text(request) for request in requests]
        pairs = pairs_of(len(texts), self.config.num_opponents)
        question = comparison(requests[0], self.config) if requests else ""

        def prefer(pair: tuple[int, int]) -> float:
            one, other = (texts[index] for index in pair)
            if one == other:
                return 0.5
            return self._judge.prefer(question, one, other, system=COMPARE_SYSTEM)

        with ThreadPoolExecutor(self.config.num_at_once, "judge-pairs") as pool:
            preferred = list(pool.map(prefer, pairs))
        won: list[list[float]] = [[] for _ in texts]
        for (one, other), share in zip(pairs, preferred, strict=True):
            won[one].append(share)
            won[other].append(1.0 - share)
        return [
            RewardResult(sum(w) / len(w) if w else 0.5, {"num_pairs": float(len(w))}) for w in won
        ]

    def _text(self, request: RewardRequest) -> str:
        if self.config.compare == "conversation":
            return talk(request, self.config.max_chars)
        return cut(request.answer, self.config.max_chars)


def pairs_of(num_members: int, num_opponents: int) -> list[tuple[int, int]]:
    """Return who is compared with whom: each with the next few of a ring, no pair twice.

    Args:
        num_members: Of the group.
        num_opponents: With how many each is compared as the first of a pair.
    """
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for apart in range(1, min(num_opponents, num_members - 1) + 1):
        for one in range(num_members):
            other = (one + apart) % num_members
            pairs.setdefault(frozenset((one, other)), (one, other))
    return list(pairs.values())
