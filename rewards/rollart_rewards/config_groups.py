"""Options of the rewards that compare answers of siblings. Never imports torch."""

from __future__ import annotations

from rollart_core.config.base import PositiveInt
from rollart_rewards.config_answers import AnswerPart, Options


class GroupDiversityConfig(Options):
    """Options of ``rollart/GroupDiversity-v1``."""

    answer: AnswerPart = "message"
    """Which part of the policy's last message is compared, as of ``rollart/ExactMatch-v1``."""
    max_chars: PositiveInt = 4_000
    """Of a longer text the beginning is compared."""
