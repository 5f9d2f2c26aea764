"""A penalty for long output.

Takes: one episode's request. Gives: 0 up to ``free``, -1 from ``limit`` on, linear between them.
Never: gives a positive reward; use it as a part of a weighted reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.config_answers import LengthPenaltyConfig
from rollart_rewards.examples import asked


class LengthPenalty(Reward):
    """Measure the length of the policy's output; see the module.

    This is the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), with ``limit`` as
    its L_max and ``limit - free`` as its L_cache.

    Args:
        options: The fields of :class:`LengthPenaltyConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = LengthPenaltyConfig.model_validate(options)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        free, limit = self.config.free, self.config.limit
        length = self._length(request)
        over = min(max(length - free, 0) / (limit - free), 1.0)
        return RewardResult(0.0 if over == 0 else -over, {"length": float(length)})

    def _length(self, request: RewardRequest) -> int:
        if self.config.unit == "tokens":
            return request.num_loss_tokens
        if self.config.unit == "turns":
            return request.num_turns
        said = [m["content"] for m in request.messages if m["role"] == "assistant"]
        return sum(len(text.split() if self.config.unit == "words" else text) for text in said)

    def examples(self) -> Sequence[RewardExample]:
        """Return an example without any message, and one without a known value."""
        silent = asked("", num_turns=0, messages=())
        return (RewardExample((silent,), (0.0,)), RewardExample((asked("one two"),)))
