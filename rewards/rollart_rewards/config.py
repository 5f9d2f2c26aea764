"""Options of the rewards, except those in ``config_answers.py`` and ``config_parts.py``.

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
    """Weight of success (1 or 0). Above 0 the environment must return ``info["success"]``."""


class GroupDiversityConfig(Options):
    """Options of ``rollart/GroupDiversity-v1``."""

    answer: AnswerPart = "message"
    """The part of the policy's last message to compare, as in ``rollart/ExactMatch-v1``."""
    max_chars: PositiveInt = 4_000
    """Only the first characters of a longer text are compared."""


class JudgeServer(Options):
    """The model that judges, its rubric, and how it is called."""

    base_url: str
    """The judge's OpenAI-compatible server, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """The name of the judge on the server."""
    rubric: Annotated[str, Field(min_length=1)]
    """What is good and what is bad, in words for the judge."""
    api_key_env: str | None = None
    """The environment variable with the API key. If not set, ``OPENAI_API_KEY`` is used if it is
    defined."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens of a judge's answer, including its reasoning."""
    max_chars: Annotated[int, Field(gt=100, le=MOST)] = 40_000
    """A longer text (a conversation or an answer) is cut in the middle."""
    answer_s: Seconds = 60.0
    """Time limit of one answer. ``deadlines.reward_s`` limits the total with all retries."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Added to every request, such as ``{reasoning_effort: low}``."""


class JudgeConfig(JudgeServer):
    """Options of ``rollart/Judge-v1``."""

    low: Number = 0.0
    """The worst grade; it gives a reward of 0."""
    high: Number = 10.0
    """The best grade; it gives a reward of 1."""
    reference: str | None = None
    """Key of ``info["reward_context"]`` with a correct answer to show to the judge. If not set,
    the judge sees no correct answer."""

    @model_validator(mode="after")
    def _ordered(self) -> JudgeConfig:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class JudgeCompareConfig(JudgeServer):
    """Options of ``rollart/JudgeCompare-v1``."""

    reference: Annotated[str, Field(min_length=1)] = "reference"
    """Key of ``info["reward_context"]`` with the answer to compare with. If it is a list, the first
    is used."""


class JudgeGroupConfig(JudgeServer):
    """Options of ``rollart/JudgeGroup-v1``."""

    compare: Literal["answer", "conversation"] = "answer"
    """What is compared between two siblings: their last messages, or the whole conversations."""
    num_opponents: PositiveInt = 2
    """Number of siblings that each member is compared with as the first of a pair. Each member is
    in twice as many pairs, or in all pairs if there are fewer."""
    num_at_once: PositiveInt = 8
    """Maximum number of concurrent requests to the judge."""


class RewardModelConfig(Options):
    """Options of ``rollart/RewardModel-v1``."""

    model: Annotated[str, Field(min_length=1)]
    """A transformers sequence classifier with its tokenizer: a folder, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. If not set, the newest is used."""
    label: Count = 0
    """Index of the model output to use. With one output the value is
    ``1 / (1 + exp(-(output - center) / scale))``; with several, it is the softmax share of this."""
    center: Number = 0.0
    """For a model with one output: the output that gives the value 0.5."""
    scale: Positive = 1.0
    """Outputs are divided by this."""
    max_tokens: PositiveInt = 4096
    """A longer conversation is cut at its beginning."""
    max_batch: PositiveInt = 8
    """Maximum number of conversations in one forward pass. The last digits of a value depend on the
    other conversations of its batch; with 1 they do not."""
    device: str = "cpu"
    """The torch device, such as ``cuda:0``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights. ``auto``: as in the model's files."""
    num_threads: PositiveInt | None = None
    """Threads of a forward pass on a CPU. If not set, the default of torch in this process."""
    local_only: bool = False
    """Whether downloads from the hub are disabled."""


class UnitTestsConfig(SandboxedOptions):
    """Options of ``rollart/UnitTests-v1``."""

    tests: Annotated[str, Field(min_length=1)] = "tests"
    """Key of ``info["reward_context"]`` with the tests that the environment provides."""
    credit: Literal["all", "share"] = "all"
    """``all``: the value is 1 if all tests pass. ``share``: the value is the share that pass."""
    test_timeout_s: Seconds = 10.0
    """Seconds for each test in Python. Tests run one after the other."""
    cpu_s: Seconds = 5.0
    """CPU seconds of the program for each input. The load of the machine does not change it."""
    abs_tol: NonNegative = 0.0
    """Allowed absolute difference between numbers in an output and the right ones."""
    max_tests: PositiveInt = 100
    """If there are more tests, only the first ones are run."""
    python: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path in the sandbox of the Python (3.8 or newer) that runs the tests. Default: the
    `python3` on its PATH."""
