"""Check whether a pattern matches in the policy's last message.

Takes: one episode's request. Gives: 1 or 0. Never: searches a text longer than ``max_chars``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.answer import answer_part
from rollart_rewards.config_answers import RegexConfig
from rollart_rewards.examples import asked


class Regex(Reward):
    """Search for a pattern; see the module.

    Args:
        options: The fields of :class:`RegexConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = config = RegexConfig.model_validate(options)
        flags = re.MULTILINE | (re.IGNORECASE if config.ignore_case else 0)
        self._pattern = re.compile(config.pattern, flags)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        said = answer_part(request.answer, self.config.answer)
        if said is None or len(said) > self.config.max_chars:
            return RewardResult(0.0)
        return RewardResult(float(self._pattern.search(said) is not None))

    def examples(self) -> Sequence[RewardExample]:
        """Return requests without a right answer, which this reward does not need."""
        return (RewardExample((asked("red"),)), RewardExample((asked(""),)))
