"""Options of the built-in reward functions. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EnvReturnConfig(BaseModel):
    """Options of ``rollart/EnvReturn-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    return_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Weight of the sum of the environment's rewards."""
    success_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of its success (1 or 0); above 0 the environment must say ``info["success"]``."""


class JudgeConfig(BaseModel):
    """Options of ``rollart/Judge-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """The judge's OpenAI-compatible server, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """What the server calls the judge."""
    rubric: Annotated[str, Field(min_length=1)]
    """What is good and what is bad, in words for the judge."""
    low: float = 0.0
    """The worst grade: a reward of 0."""
    high: float = 10.0
    """The best grade: a reward of 1."""
    api_key_env: str | None = None
    """The variable of the environment that holds the key; none: ``OPENAI_API_KEY`` where it is
    set."""
    max_new_tokens: Annotated[int, Field(gt=0)] = 512
    """Most tokens of an answer, what the judge thinks included."""
    max_chars: Annotated[int, Field(gt=100)] = 40_000
    """A longer conversation is cut in the middle."""
    answer_s: Annotated[float, Field(gt=0)] = 60.0
    """How long one answer may take; ``deadlines.reward_s`` bounds it with all its retries."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Added to every request, such as ``{reasoning_effort: low}``."""

    @model_validator(mode="after")
    def _ordered(self) -> JudgeConfig:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self
