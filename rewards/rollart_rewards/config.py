"""Options of the rewards, but for those in ``config_answers.py`` and ``config_parts.py``.

Takes: plain values. Gives: frozen models. Never: imports torch, an HTTP client or a sandbox.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import (
    MOST,
    Count,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    Seconds,
)
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_rewards.config_answers import AnswerPart, Options


class EnvReturnConfig(BaseModel):
    """Options of ``rollart/EnvReturn-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    return_weight: NonNegative = 1.0
    """Weight of the sum of the environment's rewards."""
    success_weight: NonNegative = 0.0
    """Weight of its success (1 or 0); above 0 the environment must say ``info["success"]``."""


class GroupDiversityConfig(Options):
    """Options of ``rollart/GroupDiversity-v1``."""

    answer: AnswerPart = "message"
    """Which part of the policy's last message is compared, as of ``rollart/ExactMatch-v1``."""
    max_chars: PositiveInt = 4_000
    """Of a longer text the beginning is compared."""


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


class RewardModelConfig(Options):
    """Options of ``rollart/RewardModel-v1``."""

    model: Annotated[str, Field(min_length=1)]
    """A sequence classifier of transformers with its tokenizer: a folder, or a name on the hub."""
    revision: str | None = None
    """Of a model on the hub: branch, tag or commit; none: its newest."""
    label: Count = 0
    """Which of the model's outputs counts. With one output the value is
    ``1 / (1 + exp(-(output - center) / scale))``, with several the softmax's share of this one."""
    center: Number = 0.0
    """Of a model with one output: the output that is worth 0.5."""
    scale: Positive = 1.0
    """Outputs are divided by this first."""
    max_tokens: PositiveInt = 4096
    """A longer conversation loses its beginning."""
    max_batch: PositiveInt = 8
    """Most conversations in one forward pass. In a batch the last digits of a value depend on its
    neighbours; with 1 they do not."""
    device: str = "cpu"
    """Such as ``cuda:0``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """What weights are held in; ``auto``: as the model's files have them."""
    num_threads: PositiveInt | None = None
    """Threads of a forward pass on a CPU; none: as torch has it in this process."""
    local_only: bool = False
    """Whether nothing may be fetched from the hub."""


class UnitTestsConfig(SandboxedOptions):
    """Options of ``rollart/UnitTests-v1``."""

    tests: Annotated[str, Field(min_length=1)] = "tests"
    """Key of ``info["reward_context"]`` under which the environment hands over the tests."""
    credit: Literal["all", "share"] = "all"
    """Whether 1 is for passing all tests, or the value is the share that pass."""
    test_timeout_s: Seconds = 10.0
    """Seconds for each test in Python; they run one after the other."""
    cpu_s: Seconds = 5.0
    """Processor seconds of the program for each input; a busy machine makes no answer wrong."""
    abs_tol: NonNegative = 0.0
    """How far numbers in an output may be from the right ones."""
    max_tests: PositiveInt = 100
    """Of more tests, the first ones are run."""
    python: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Python 3.8 or newer that runs them, as an absolute path in the box; empty: the `python3` on
    its PATH."""
