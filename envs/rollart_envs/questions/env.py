"""Questions, each answered in one turn.

Takes: an answer. Gives: 1 if it equals the right one except for spaces, else 0; and the fields that
the options name, to the run's reward. Never: shows an answer, or puts one question in two splits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import gymnasium
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.errors import UserError
from rollart_core.spaces import Text
from rollart_core.types import Observation
from rollart_envs.files import missing_files
from rollart_envs.swe.reader import read_rows
from rollart_envs.swe.task import RowError

SPLITS: Final = ("train", "warm", "test")
_NUM_SUMS: Final = {"train": 8_000, "warm": 1_000, "test": 1_000}
_LARGEST: Final = 99
_MIN_SECRET_CHARS: Final = 4
"""Shorter answers can occur in other texts by chance."""

Name = Annotated[str, Field(min_length=1)]


class QuestionsConfig(BaseModel):
    """Options of ``text/Questions-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path | None = None
    """Rows, `.jsonl` or `.parquet`. If not set: built-in sums, such as `What is 17 + 58?`."""
    question: Name = "question"
    """Field of a row with the question."""
    context: dict[Name, Name] = Field(default_factory=lambda: {"reference": "answer"})
    """Data for the run's reward (``info["reward_context"]``): its key -> field of a row. The key
    ``reference`` has the right answer, which the environment also uses for its own reward."""
    prompt: str = ""
    """Text before every question."""

    @model_validator(mode="after")
    def _of_a_file(self) -> QuestionsConfig:
        for name in ("question", "context"):
            is_other = getattr(self, name) != getattr(_DEFAULTS, name)
            if self.file is None and is_other:
                raise ValueError(f"{name} has no effect without a file; set file, or remove it")
        return self

    def missing(self) -> dict[str, str]:
        """Return the problem if the file is missing on this machine."""
        return missing_files(file=self.file)


_DEFAULTS = QuestionsConfig.model_construct()


@dataclass(frozen=True, slots=True)
class Question:
    """One question, with its context for the reward."""

    text: str
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[str]:
        """The right answers; empty if they are not known."""
        given = self.context.get("reference", [])
        return [str(one) for one in (given if isinstance(given, list) else [given])]


class QuestionsEnv(gymnasium.Env[Observation, str]):
    """Answer a question; see :class:`QuestionsConfig`.

    Args:
        options: The fields of the config.

    Raises:
        UserError: If the file cannot be read, or a row is not a question.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        self.config = config = QuestionsConfig.model_validate(options)
        self.observation_space = Text()
        self.action_space = Text()
        self._splits = (
            sums()
            if config.file is None
            else _of_file(config.file, config.question, tuple(config.context.items()))
        )
        self._question: Question | None = None

    def num_tasks(self, split: str) -> int:
        """Return the number of questions of a split."""
        return len(self._of_split(split))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask the question of ``options`` (``task``, ``split``), or one drawn by ``seed``."""
        super().reset(seed=seed)
        options = options or {}
        questions = self._of_split(options.get("split", "train"))
        index = options.get("task")
        if index is None:
            index = int(self.np_random.integers(len(questions)))
        if not 0 <= index < len(questions):
            raise ValueError(f"question {index} of {len(questions)}")
        self._question = questions[index]
        return self._asked(self._question), {"reward_context": dict(self._question.context)}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        if self._question is None:
            raise RuntimeError("no question is open: call reset() first")
        answers, self._question = self._question.answers, None
        if not answers:
            return "Answered.", 0.0, True, False, {}
        right = " ".join(action.split()) in {" ".join(one.split()) for one in answers}
        return "Answered.", float(right), True, False, {"success": right}

    def close(self) -> None:
        """Forget the question; can be called twice."""
        self._question = None

    def oracle(self) -> str | None:
        """Return the first right answer; None if it is not known, or no question is open."""
        answers = self._question.answers if self._question else []
        return answers[0] if answers else None

    def secrets(self) -> tuple[str, ...]:
        """Return the right answers that are long enough and are not in the question."""
        if self._question is None:
            return ()
        said = self._asked(self._question)
        return tuple(
            one
            for one in self._question.answers
            if len(one) >= _MIN_SECRET_CHARS and one not in said
        )

    def corpus(self) -> Iterator[str]:
        """Yield the questions and answers of ``train``."""
        for question in self._splits["train"]:
            yield f"{self._asked(question)}\n{next(iter(question.answers), '')}\nAnswered."

    def _asked(self, question: Question) -> str:
        return f"{self.config.prompt}\n{question.text}" if self.config.prompt else question.text

    def _of_split(self, split: str) -> tuple[Question, ...]:
        if split not in self._splits:
            raise ValueError(f"no split {split!r}; there are: {', '.join(self._splits)}")
        return self._splits[split]


@lru_cache(maxsize=1)
def sums() -> dict[str, tuple[Question, ...]]:
    """Return the sums of two numbers up to 99, each in one split."""
    pairs = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    questions = [Question(f"What is {a} + {b}?", {"reference": str(a + b)}) for a, b in pairs]
    found, begin = {}, 0
    for split, size in _NUM_SUMS.items():
        found[split] = tuple(questions[begin : begin + size])
        begin += size
    return found


@lru_cache(maxsize=8)
def _of_file(
    path: Path, question: str, context: tuple[tuple[str, str], ...]
) -> dict[str, tuple[Question, ...]]:
    """Return the questions of a file.

    A row can set its ``split``. Of every ten other rows, the ninth is in ``warm`` and the tenth in
    ``test``.

    Raises:
        UserError: If the file cannot be read, or a row is not a question.
    """
    found: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for number, row in read_rows(path):
        try:
            if isinstance(row, RowError):
                raise row
            split = str(row.get("split") or {9: "warm", 0: "test"}.get(number % 10, "train"))
            if split not in found:
                raise RowError("split", f"is {split!r}, not one of {', '.join(SPLITS)}")
            found[split].append(_question(row, question, context))
        except RowError as error:
            raise UserError(f"{path}, row {number}: {error}") from None
    if not found["train"]:
        raise UserError(f"{path}: has no question of the split train")
    return {split: tuple(questions) for split, questions in found.items()}


def _question(row: Any, name: str, context: tuple[tuple[str, str], ...]) -> Question:
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        raise RowError(name, f"is {text!r:.60}; a question must be a text that is not empty")
    told = {}
    for key, source in context:
        if row.get(source) is None:
            raise RowError(source, "is missing")
        told[key] = row[source]
    try:
        json.dumps(told, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise RowError(", ".join(told), f"is not JSON: {e}") from None
    return Question(text, told)
