"""Options of the rewards that ask a model for its opinion. Never imports an HTTP client."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart_core.config.base import MOST, Number, PositiveInt, Seconds
from rollart_rewards.config_answers import Options


class JudgeServer(Options):
    """Which model judges, by what, and how it is asked."""

    base_url: str
    """The judge's OpenAI-compatible server, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """What the server calls the judge."""
    rubric: Annotated[str, Field(min_length=1)]
    """What is good and what is bad, in words for the judge."""
    api_key_env: str | None = None
    """The variable of the environment that holds the key; none: ``OPENAI_API_KEY`` where it is
    set."""
    max_new_tokens: PositiveInt = 512
    """Most tokens of an answer, what the judge thinks included."""
    max_chars: Annotated[int, Field(gt=100, le=MOST)] = 40_000
    """A longer text (a conversation, an answer) is cut in the middle."""
    answer_s: Seconds = 60.0
    """How long one answer may take; ``deadlines.reward_s`` bounds it with all its retries."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Added to every request, such as ``{reasoning_effort: low}``."""


class JudgeConfig(JudgeServer):
    """Options of ``rollart/Judge-v1``."""

    low: Number = 0.0
    """The worst grade: a reward of 0."""
    high: Number = 10.0
    """The best grade: a reward of 1."""
    reference: str | None = None
    """Key of ``info["reward_context"]`` under which the environment hands over a right answer,
    which the judge is shown; none: it is shown none."""

    @model_validator(mode="after")
    def _ordered(self) -> JudgeConfig:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class JudgeCompareConfig(JudgeServer):
    """Options of ``rollart/JudgeCompare-v1``."""

    reference: Annotated[str, Field(min_length=1)] = "reference"
    """Key of ``info["reward_context"]`` under which the environment hands over the answer to
    compare with; of several the first."""


class JudgeGroupConfig(JudgeServer):
    """Options of ``rollart/JudgeGroup-v1``."""

    compare: Literal["answer", "conversation"] = "answer"
    """What of two siblings is compared: their last messages, or all that was said."""
    num_opponents: PositiveInt = 2
    """With how many of its siblings each is compared as the first of a pair; so each takes part in
    twice as many pairs, or in all there are."""
    num_at_once: PositiveInt = 8
    """Most questions to the judge at once."""
