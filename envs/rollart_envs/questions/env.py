"""Questions, each answered in one turn.

Takes: an answer. Gives: 1 if it equals the right one except for spaces, else 0; and the columns of
the row, to the run's reward, which decides success if there is one. Never: shows an answer, or puts
one question in two splits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import gymnasium

from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_core.spaces import Messages, Text
from rollart_core.types import Observation
from rollart_envs.questions.config import QuestionsConfig
from rollart_envs.questions.dataset import Dataset, Question, read_dataset, similar_questions

if TYPE_CHECKING:
    from rollart_core.runtime.report import RunReport

_NUM_SUMS: Final = {"train": 7_000, "validation": 1_000, "warm": 1_000, "test": 1_000}
_LARGEST: Final = 99
_MIN_SECRET_CHARS: Final = 4
"""Shorter answers can occur in other texts by chance."""


class QuestionsEnv(gymnasium.Env[Observation, str]):
    """Answer a question; see :class:`QuestionsConfig`.

    Args:
        options: The fields of the config.

    Raises:
        UserError: If the dataset cannot be read, or a row is not a question.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        self.config = config = QuestionsConfig.model_validate(options)
        self._dataset = Dataset(sums()) if config.file is None else read_dataset(config)
        asked = next(q.asked for questions in self._dataset.splits.values() for q in questions)
        self.observation_space = Text() if isinstance(asked, str) else Messages()
        self.action_space = Text()
        self._question: Question | None = None

    def num_tasks(self, split: str) -> int:
        """Return the number of questions of a split.

        Raises:
            UserError: If it has none.
        """
        return len(self._of_split(split))

    def notes(self) -> list[str]:
        """Return what a user should know about the dataset before a run."""
        pairs = similar_questions(self._dataset)
        shown = "; ".join(f"{one.where} and {other.where}" for one, other in pairs[:2])
        count = f"Questions that are similar to one of another split: {len(pairs):,} ({shown})"
        return [*self._dataset.notes, *([count] if pairs else [])]

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
        return self._question.asked, {"reward_context": dict(self._question.context)}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        if self._question is None:
            raise RuntimeError("no question is open: call reset() first")
        question, self._question = self._question, None
        accepted = [*question.answers, question.demonstration or ""]
        right = " ".join(action.split()) in {" ".join(one.split()) for one in accepted if one}
        # Of other answers in a preset's form, only the reward knows whether they are right.
        is_known = right or (question.answers and not self.config.preset)
        return "Answered.", float(right), True, False, {"success": right} if is_known else {}

    @staticmethod
    def fit(*args: Any, **settings: Any) -> RunReport:
        """Train a model on a dataset; see :func:`rollart_core.fit`."""
        call: Any = registry.load_object("rollart_envs.questions.fit:fit", "questions")
        report: RunReport = call(*args, **settings)
        return report

    def close(self) -> None:
        """Forget the question; can be called twice."""
        self._question = None

    def oracle(self) -> str | None:
        """Return an expert's answer, or the first right one; None if neither is known."""
        return _solved(self._question) if self._question else None

    def secrets(self) -> tuple[str, ...]:
        """Return the right answers that are long enough and are not in the question."""
        if self._question is None:
            return ()
        said = self._question.text
        answers = self._question.answers
        return tuple(one for one in answers if len(one) >= _MIN_SECRET_CHARS and one not in said)

    def corpus(self) -> Iterator[str]:
        """Yield the questions and answers of ``train``."""
        for question in self._dataset.splits["train"]:
            yield f"{question.text}\n{_solved(question) or ''}\nAnswered."

    def _of_split(self, split: str) -> tuple[Question, ...]:
        splits = self._dataset.splits
        if split not in splits:
            raise ValueError(f"no split {split!r}; there are: {', '.join(splits)}")
        if not splits[split]:
            total = sum(map(len, splits.values()))
            raise UserError(
                f"{self.config.file}: the split {split!r} has no question, and all splits have "
                f"{total:,}: add rows, name the split of rows, or increase shares.{split}"
            )
        return splits[split]


def _solved(question: Question) -> str | None:
    return question.demonstration or next(iter(question.answers), None)


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
