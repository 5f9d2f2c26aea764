"""The questions of a dataset, each in exactly one split.

    rows -> fields or preset -> Question -> split: named by the dataset, else by a hash

Takes: the options of ``text/Questions-v1``. Gives: :class:`Dataset`, the questions of each split,
and pairs of similar questions in different splits. Never: puts one question into two splits, or
skips a row that is not a question.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from functools import lru_cache
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollart_core.errors import UserError, did_you_mean
from rollart_core.types import Message, Observation
from rollart_envs.questions.config import SPLIT_NAMES, SPLITS, Drawn, QuestionsConfig
from rollart_envs.questions.presets import PRESETS
from rollart_envs.rows import Row, RowError, rows_of, split_sources

QUESTION_FIELDS: Final = ("prompt", "question", "messages")
ANSWER_FIELDS: Final = ("answer", "reference", "ground_truth", "solution")
_ROLES: Final = ("system", "user", "assistant")
_DRAWN: Final[tuple[Drawn, ...]] = ("test", "validation", "warm")
"""Splits that are drawn from ``train`` if the dataset does not name them, in order of the hash."""
_NUM_HASHES, _NUM_BANDS = 64, 16
_LIKENESS: Final = 0.8
"""Share of equal minimum hashes from which two questions are similar."""
_MIN_WORDS: Final = 8
"""Shorter questions are similar only if all their words are equal."""
_WORDS = re.compile(r"\w+|[^\w\s.,;:!?'\"()]")


@dataclass(frozen=True, slots=True)
class Question:
    """One question, with its context for the reward."""

    asked: Observation
    """What the policy reads: a text, or messages."""
    context: Mapping[str, Any] = field(default_factory=dict)
    demonstration: str | None = None
    """An expert's answer. None: the right answer itself."""
    where: str = ""
    """The row, for messages."""

    @property
    def text(self) -> str:
        """The question as one text."""
        if isinstance(self.asked, str):
            return self.asked
        return "\n".join(message["content"] for message in self.asked)

    @property
    def key(self) -> str:
        """The same text for questions that differ only in case and whitespace."""
        return " ".join(self.text.casefold().split())

    @property
    def answers(self) -> list[str]:
        """The right answers; empty if they are not known."""
        given = self.context.get("reference")
        several = given if isinstance(given, list) else [given]
        return [str(one) for one in several if isinstance(one, str | int | float)]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All questions of a dataset, by split."""

    splits: Mapping[str, tuple[Question, ...]]
    notes: tuple[str, ...] = ()
    """What was left out."""


def read_dataset(config: QuestionsConfig) -> Dataset:
    """Return the questions of a dataset.

    Raises:
        UserError: If it cannot be read, a row is not a question, or a question is in two splits.
    """
    return _read(config.model_dump_json())


@lru_cache(maxsize=8)
def _read(options: str) -> Dataset:
    config = QuestionsConfig.model_validate_json(options)
    assert config.file is not None
    reader, ignored = _Reader(config), []
    found: dict[str, list[Question]] = {split: [] for split in ("", *SPLITS)}
    for name, part in _sources(config).items():
        split = SPLIT_NAMES.get(name.lower(), "" if not name else None)
        if split is None:
            ignored.append(name)
            continue
        for own, question in reader.questions(part, name):
            found[own or split].append(question)
    if not any(found.values()):
        names = f": its splits are {', '.join(ignored)}, not {', '.join(SPLITS)}" if ignored else ""
        raise UserError(f"{config.file}: has no rows{names}")
    notes = [f"Ignored splits: {', '.join(ignored)}"] if ignored else []
    return _disjoint(_drawn(found, config), config, notes)


def _sources(config: QuestionsConfig) -> dict[str, Path | Any]:
    if not isinstance(config.file, Mapping):
        return split_sources(str(config.file), config.subset)
    return {split: Path(path).expanduser() for split, path in config.file.items()}


class _Reader:
    """Makes questions from rows; the first row decides which fields are used."""

    def __init__(self, config: QuestionsConfig) -> None:
        self._config = config
        self._preset = PRESETS[config.preset] if config.preset else None
        prompt = self._preset.prompt if self._preset and config.prompt is None else config.prompt
        self._prompt = prompt or ""
        self._question, self._answer = config.question, config.answer
        self._is_first = True

    def questions(self, part: Path | Any, name: str) -> Iterator[tuple[str, Question]]:
        """Yield the split that each row names, if any, and its question.

        Raises:
            UserError: If a row is not a question.
        """
        file = part if isinstance(part, Path) else f"{self._config.file}, split {name or 'train'}"
        for number, row in rows_of(part):
            try:
                if isinstance(row, RowError):
                    raise row
                yield self._split(row), self._read(row, f"{file}, row {number}")
            except RowError as error:
                raise UserError(f"{file}, row {number}: {error}") from None

    def _split(self, row: Row) -> str:
        given = row.get(self._config.split)
        if given is None or given == "":
            return ""
        split = SPLIT_NAMES.get(str(given).lower())
        if split is None:
            raise RowError(self._config.split, f"is {given!r}, not one of {', '.join(SPLITS)}")
        return split

    def _read(self, row: Row, where: str) -> Question:
        if self._preset:
            parts = self._preset.read(row)
            context = {**_columns(row, ()), **parts.context, **self._named(row)}
            return Question(self._with_prompt(parts.question), context, parts.demonstration, where)
        if self._is_first:
            self._choose_fields(row)
        assert self._question is not None
        asked, said = _asked(value_of(row, self._question), self._question)
        demonstration = said or _completion(row)
        context = _columns(row, (self._question, self._config.split))
        if isinstance(asked, list):
            context["prompt"] = asked
        if self._answer:
            context["reference"] = _json(value_of(row, self._answer), self._answer)
        elif demonstration is not None:
            context["reference"] = demonstration
        context |= self._named(row)
        return Question(self._with_prompt(asked), context, demonstration, where)

    def _choose_fields(self, row: Row) -> None:
        """Choose the fields that the options leave open.

        Raises:
            RowError: If no field has a known name.
        """
        self._is_first = False
        known = (name for name in QUESTION_FIELDS if row.get(name) is not None)
        self._question = self._question or next(known, None)
        if self._question is None:
            near = did_you_mean(QUESTION_FIELDS[1], [str(name) for name in row])
            names = ", ".join(map(str, row)) or "none"
            raise RowError(
                " or ".join(QUESTION_FIELDS),
                f"is missing; the fields are {names}. Set the option question to one.{near}",
            )
        answers = (n for n in ANSWER_FIELDS if row.get(n) is not None and n != self._question)
        if self._answer is None:
            self._answer = next(answers, None)

    def _named(self, row: Row) -> dict[str, Any]:
        """Return the entries of the option ``context``."""
        return {key: _json(value_of(row, f), f) for key, f in self._config.context.items()}

    def _with_prompt(self, asked: Observation) -> Observation:
        if not self._prompt:
            return asked
        if isinstance(asked, str):
            return f"{self._prompt}\n{asked}"
        *before, last = asked
        return [*before, {**last, "content": f"{self._prompt}\n{last['content']}"}]


def value_of(row: Row, name: str) -> Any:
    """Return a field; a dot reads inside an object.

    Raises:
        RowError: If it is missing.
    """
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        near = did_you_mean(name, [str(one) for one in row])
        raise RowError(name, f"is missing.{near}" if near else "is missing")
    return value


def _asked(value: Any, name: str) -> tuple[Observation, str | None]:
    """Return what the policy reads, and the answer that stands after it, if any."""
    if isinstance(value, str) and value.strip():
        return value, None
    if not isinstance(value, list) or not value:
        what = "a question must be a text that is not empty, or a list of messages"
        raise RowError(name, f"is {value!r:.60}; {what}")
    messages = [_message(one, f"{name}.{i}") for i, one in enumerate(value)]
    said = None
    while messages and messages[-1]["role"] == "assistant":
        said = messages.pop()["content"]
    if not messages or messages[-1]["role"] != "user":
        raise RowError(name, "has no message of the user before the answer")
    return messages, said


def _message(value: Any, name: str) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    if role not in _ROLES:
        raise RowError(name, f"is {value!r:.60}; its role must be one of {', '.join(_ROLES)}")
    return {"role": role, "content": content_text(value.get("content"), name)}


def content_text(content: Any, name: str) -> str:
    """Return the content of a message as one text.

    Args:
        content: A text, or a list of parts of the type ``text``.
        name: The field, for errors.

    Raises:
        RowError: If it is something else, such as an image.
    """
    if isinstance(content, list):
        kinds = [one.get("type") if isinstance(one, Mapping) else None for one in content]
        other = next((kind for kind in kinds if kind != "text"), None)
        if other is not None:
            raise RowError(name, f"has content of type {other!r}; text models read only text")
        content = "\n".join(str(one.get("text", "")) for one in content)
    if not isinstance(content, str):
        raise RowError(name, f"has the content {content!r:.60}, which is not a text")
    return content


def _completion(row: Row) -> str | None:
    """Return TRL's column ``completion`` as one text."""
    value = row.get("completion")
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def _columns(row: Row, without: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that are JSON; dates become texts, images and bytes are left out."""
    found = {}
    for name, value in row.items():
        if name not in without:
            try:
                found[name] = _json(value, name)
            except RowError:
                continue
    return found


def _json(value: Any, name: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_plain))
    except (TypeError, ValueError) as e:
        raise RowError(name, f"is not JSON: {e}") from None


def _plain(value: object) -> object:
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _drawn(
    found: Mapping[str, list[Question]], config: QuestionsConfig
) -> dict[str, list[Question]]:
    """Return the splits; those that the dataset does not name are drawn from ``train``."""
    splits = {split: list(found[split]) for split in SPLITS}
    pool, splits["train"] = [*found["train"], *found[""]], []
    for question in pool:
        drawn = split_of(question.key, config.shares, config.split_seed)
        splits["train" if found[drawn] else drawn].append(question)
    return splits


def split_of(key: str, shares: Mapping[Drawn, float], seed: int) -> str:
    """Return the split of a question, drawn by a hash.

    Args:
        key: See :attr:`Question.key`.
        shares: Share of each split; the rest is ``train``.
        seed: Seed of the hash.
    """
    digest = blake2b(f"{seed}\0{key}".encode("utf-8", "replace"), digest_size=8)
    place, end = int.from_bytes(digest.digest(), "big") / 2**64, 0.0
    for split in _DRAWN:
        end += shares.get(split, 0.0)
        if place < end:
            return split
    return "train"


def _disjoint(
    splits: Mapping[str, list[Question]], config: QuestionsConfig, notes: list[str]
) -> Dataset:
    """Return the dataset without questions that are in two splits.

    Raises:
        UserError: If there are some, and the option ``duplicates`` refuses them.
    """
    owners: dict[str, tuple[str, Question]] = {}
    kept: dict[str, tuple[Question, ...]] = {}
    num_dropped = 0
    for split in (*_DRAWN, "train"):
        own = []
        for question in splits[split]:
            owner, first = owners.setdefault(question.key, (split, question))
            if owner == split:
                own.append(question)
            elif config.duplicates == "drop":
                num_dropped += 1
            else:
                raise UserError(
                    f"{question.where} (split {split}): has the same question as {first.where} "
                    f"(split {owner}); remove one, or set duplicates: drop"
                )
        kept[split] = tuple(own)
    if num_dropped:
        notes.append(f"Dropped questions that are also in a held-out split: {num_dropped:,}")
    return Dataset({split: kept[split] for split in SPLITS}, tuple(notes))


def similar_questions(dataset: Dataset) -> list[tuple[Question, Question]]:
    """Return pairs of similar questions in different splits, each question at most once.

    Two questions are similar if their words are equal, or if the estimated Jaccard similarity of
    their sequences of three words is at least 0.8 (MinHash, Broder 1997).
    """
    pairs: dict[int, tuple[Question, Question]] = {}
    buckets: dict[tuple[int, bytes], list[tuple[str, Question, Any]]] = defaultdict(list)
    for split, questions in dataset.splits.items():
        for question in questions:
            for key, marks in _marks(_WORDS.findall(question.text.casefold())):
                buckets[key].append((split, question, marks))
    for members in buckets.values():
        for (split, one, marks), (other_split, other, others) in combinations(members[:50], 2):
            alike = marks is None or float(np.mean(marks == others)) >= _LIKENESS
            if split != other_split and alike:
                pairs.setdefault(id(other), (one, other))
    return list(pairs.values())


_FACTORS: Final = np.random.PCG64(0).random_raw(2 * _NUM_HASHES).reshape(2, -1) | 1


def _marks(words: list[str]) -> Iterator[tuple[tuple[int, bytes], Any]]:
    """Yield the buckets of a question, with its minimum hashes (None: its words are equal)."""
    yield (-1, " ".join(words).encode("utf-8", "replace")), None
    if len(words) < _MIN_WORDS:
        return
    threes = {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}
    hashes = np.array([zlib.crc32(t.encode("utf-8", "replace")) for t in threes], dtype=np.uint64)
    factors, offsets = _FACTORS
    marks = ((hashes[:, None] * factors + offsets) >> np.uint64(32)).min(axis=0)
    for band, part in enumerate(np.split(marks, _NUM_BANDS)):
        yield (band, part.tobytes()), marks
