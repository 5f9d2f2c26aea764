"""Options of the rewards that look at the policy's answer alone. Never imports torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    field_validator,
    model_validator,
)
from pydantic import Tag as Case

from rollart_core.config.base import MOST, Count, NonNegative, PositiveInt

Tag = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]


class Options(BaseModel):
    """Base of option models: frozen, and no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InTag(Options):
    """The answer stands between two tags."""

    tag: Tag
    """Such as ``answer``, for the last ``<answer>...</answer>`` of the message."""


class ByPattern(Options):
    """The answer is what a pattern finds."""

    pattern: str
    """A regular expression with one group; of several matches the last counts."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        if compiled(pattern).groups != 1:
            raise ValueError(f"{pattern!r} must have one group, which holds the answer")
        return pattern


def _kind_of_part(value: object) -> str:
    """Return which alternative is meant, so that a mistake is told of that one alone."""
    if isinstance(value, str):
        return "word"
    is_pattern = isinstance(value, ByPattern) or (isinstance(value, dict) and "pattern" in value)
    return "ByPattern" if is_pattern else "InTag"


def _known_word(value: object) -> object:
    if isinstance(value, str) and value not in ("message", "last_line", "boxed"):
        raise ValueError(
            f"{value!r} is none of message, last_line, boxed, {{tag: NAME}} and {{pattern: REGEX}}"
        )
    return value


AnswerPart = Annotated[
    Annotated[Literal["message", "last_line", "boxed"], Case("word")]
    | Annotated[InTag, Case("InTag")]
    | Annotated[ByPattern, Case("ByPattern")],
    Discriminator(_kind_of_part),
    BeforeValidator(_known_word),
]
"""Which part of the policy's last message is its answer."""


class AnswerConfig(Options):
    """What all rewards share that compare the answer with a right one."""

    answer: AnswerPart = "message"
    """Which part of the policy's last message counts: all of it, its last line, what its last
    `\\boxed{}` holds, or `{tag: NAME}`, or `{pattern: REGEX}` with one group. A message
    without that part is a wrong answer."""
    reference: Annotated[str, Field(min_length=1)] = "reference"
    """Key of ``info["reward_context"]`` under which the environment hands over the right answer: a
    text, a number, or a list of which any will do."""


class ExactMatchConfig(AnswerConfig):
    """Options of ``rollart/ExactMatch-v1``."""

    ignore: tuple[Literal["case", "space", "punctuation", "articles"], ...] = ("space",)
    """What makes no difference: case; space at the ends, and how much of it is inside;
    punctuation; the words a, an and the."""


class NumericConfig(AnswerConfig):
    """Options of ``rollart/Numeric-v1``."""

    rel_tol: NonNegative = 1e-6
    """How far the answer may be from the right one, as a share of that."""
    abs_tol: NonNegative = 0.0
    """How far it may be in any case."""


class RegexConfig(Options):
    """Options of ``rollart/Regex-v1``."""

    pattern: str
    """A regular expression that must be found, in Python's syntax; `^` and `$` are ends of
    lines."""
    answer: AnswerPart = "message"
    """Which part of the policy's last message is searched, as of ``rollart/ExactMatch-v1``."""
    ignore_case: bool = False
    """Whether case makes no difference."""
    max_chars: PositiveInt = 20_000
    """A longer text is not searched, and counts as one in which nothing was found."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compiled(pattern)
        return pattern


class MadeOfTags(Options):
    """A message is made of tags."""

    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    """These tags, each once, in this order, and nothing between."""


class MatchesPattern(Options):
    """A message matches a pattern."""

    pattern: str
    """A regular expression that the whole message must match; `.` stands for line ends too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compiled(pattern)
        return pattern


class MatchesSchema(Options):
    """A message is JSON of a form."""

    json_schema: dict[str, Any]
    """The message (its last fenced block, or all of it) must be JSON that this schema accepts."""

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        _check_schema(schema)
        return schema


def _kind_of_form(value: object) -> str:
    if isinstance(value, Options):
        return type(value).__name__
    keys = value if isinstance(value, dict) else {}
    if "json_schema" in keys:
        return "MatchesSchema"
    return "MatchesPattern" if "pattern" in keys else "MadeOfTags"


class FormatConfig(Options):
    """Options of ``rollart/Format-v1``."""

    form: Annotated[
        Annotated[MadeOfTags, Case("MadeOfTags")]
        | Annotated[MatchesPattern, Case("MatchesPattern")]
        | Annotated[MatchesSchema, Case("MatchesSchema")],
        Discriminator(_kind_of_form),
    ]
    """What a message must be: ``{tags: [think, answer]}``, these tags, each once, in this order and
    with nothing between; ``{pattern: REGEX}``, which the whole of it must match (`.` stands for
    line ends too); or ``{json_schema: SCHEMA}``, JSON that a schema accepts, alone or in a fenced
    block."""
    messages: Literal["last", "every"] = "every"
    """Whether the last message of the policy counts, or the share of them all that keep the
    form."""


class LengthPenaltyConfig(Options):
    """Options of ``rollart/LengthPenalty-v1``."""

    free: Count
    """So much costs nothing."""
    limit: PositiveInt
    """From here on the reward is -1; between the two it falls evenly."""
    unit: Literal["tokens", "words", "chars", "turns"] = "tokens"
    """What is counted, over all that the policy said in the episode."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltyConfig:
        if not self.free < self.limit:
            raise ValueError(f"free ({self.free}) must be below limit ({self.limit})")
        return self


class MathConfig(AnswerConfig):
    """Options of ``rollart/Math-v1``."""

    cpu_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Processor seconds for one comparison. An answer that needs more (it is the answer that
    decides this, not how busy the machine is) has not been shown to be right, and is worth 0."""
    memory_mib: Annotated[int, Field(ge=256, le=MOST)] = 1024
    """Memory for the process that compares; an answer that needs more is worth 0 too."""
    num_processes: PositiveInt = 2
    """Most processes that compare at once; they are started when they are first needed."""
    decimals: Count = 6
    """Numbers are compared after rounding to so many places."""
    strict: bool = True
    """Whether `(1, 2)` and `{1, 2}`, or `x` and `y`, differ."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern, compiled.

    Raises:
        ValueError: When it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ValueError(f"{pattern!r} is no regular expression: {e}") from e


def _check_schema(schema: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as e:
        raise ValueError(f"json_schema is none: {e.message}") from e
