"""Options of the rewards that use only the policy's answer. Never imports torch."""

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
    """Base of option models: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InTag(Options):
    """The answer is between two tags."""

    tag: Tag
    """Such as ``answer``, for the last ``<answer>...</answer>`` of the message."""


class ByPattern(Options):
    """The answer is the match of a pattern."""

    pattern: str
    """A regular expression with one group. If there are several matches, the last is used."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        if compiled(pattern).groups != 1:
            raise ValueError(f"{pattern!r} must have exactly one group, which matches the answer")
        return pattern


def _kind_of_part(value: object) -> str:
    """Return the alternative that is meant, so that an error refers to that one only."""
    if isinstance(value, str):
        return "word"
    is_pattern = isinstance(value, ByPattern) or (isinstance(value, dict) and "pattern" in value)
    return "ByPattern" if is_pattern else "InTag"


def _known_word(value: object) -> object:
    if isinstance(value, str) and value not in ("message", "last_line", "boxed"):
        raise ValueError(
            f"{value!r} is not one of message, last_line, boxed, {{tag: NAME}}, {{pattern: REGEX}}"
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
    """Common options of rewards that compare the answer with a right one."""

    answer: AnswerPart = "message"
    """The part of the policy's last message to use: the whole message, its last line, the content
    of its last `\\boxed{}`, or `{tag: NAME}`, or `{pattern: REGEX}` with one group. A message
    without that part is a wrong answer."""
    reference: Annotated[str, Field(min_length=1)] = "reference"
    """Key of ``info["reward_context"]`` with the right answer: a text, a number, or a list of which
    any is accepted."""


class ExactMatchConfig(AnswerConfig):
    """Options of ``rollart/ExactMatch-v1``."""

    ignore: tuple[Literal["case", "space", "punctuation", "articles"], ...] = ("space",)
    """Differences to ignore: case; whitespace at the ends and the amount of it inside;
    punctuation; the words a, an and the."""


class NumericConfig(AnswerConfig):
    """Options of ``rollart/Numeric-v1``."""

    rel_tol: NonNegative = 1e-6
    """Allowed difference between the answer and the right one, relative to the right one."""
    abs_tol: NonNegative = 0.0
    """Allowed absolute difference."""


class RegexConfig(Options):
    """Options of ``rollart/Regex-v1``."""

    pattern: str
    """A regular expression to search for, in Python's syntax; `^` and `$` match at the ends of
    lines."""
    answer: AnswerPart = "message"
    """The part of the policy's last message to search, as in ``rollart/ExactMatch-v1``."""
    ignore_case: bool = False
    """Whether case is ignored."""
    max_chars: PositiveInt = 20_000
    """A longer text is not searched and counts as no match."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compiled(pattern)
        return pattern


class MadeOfTags(Options):
    """A message consists of tags."""

    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    """These tags, each once, in this order, with nothing between them."""


class MatchesPattern(Options):
    """A message matches a pattern."""

    pattern: str
    """A regular expression that the whole message must match; `.` also matches line ends."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compiled(pattern)
        return pattern


class MatchesSchema(Options):
    """A message is JSON that matches a schema."""

    json_schema: dict[str, Any]
    """The message (its last fenced block, or all of it) must be JSON that is valid for this."""

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
    """The form of a message. ``{tags: [think, answer]}``: these tags, each once, in this order and
    with nothing between them. ``{pattern: REGEX}``: the whole message must match (`.` also matches
    line ends). ``{json_schema: SCHEMA}``: JSON that is valid for a schema, alone or in a fenced
    block."""
    messages: Literal["last", "every"] = "every"
    """``last``: the policy's last message is checked. ``every``: the value is the share of all its
    messages that have the form."""


class LengthPenaltyConfig(Options):
    """Options of ``rollart/LengthPenalty-v1``."""

    free: Count
    """The reward is 0 up to this length."""
    limit: PositiveInt
    """From this length on the reward is -1. Between the two it falls linearly."""
    unit: Literal["tokens", "words", "chars", "turns"] = "tokens"
    """The unit of length, counted over all messages of the policy in the episode."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltyConfig:
        if not self.free < self.limit:
            raise ValueError(f"free ({self.free}) must be below limit ({self.limit})")
        return self


class MathConfig(AnswerConfig):
    """Options of ``rollart/Math-v1``."""

    cpu_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """CPU seconds for one comparison. If an answer needs more, its value is 0. The answer decides
    this, not the load of the machine."""
    memory_mib: Annotated[int, Field(ge=256, le=MOST)] = 1024
    """Memory of the process that compares. If an answer needs more, its value is 0."""
    num_processes: PositiveInt = 2
    """Maximum number of processes that compare concurrently. They start when first needed."""
    decimals: Count = 6
    """Numbers are rounded to this number of decimal places before they are compared."""
    strict: bool = True
    """Whether `(1, 2)` and `{1, 2}`, or `x` and `y`, are different."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern.

    Raises:
        ValueError: If it is not a valid regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {e}") from e


def _check_schema(schema: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as e:
        raise ValueError(f"json_schema is not a valid JSON schema: {e.message}") from e
