"""Options of ``text/Questions-v1``.

Takes: plain values. Gives: a frozen model, the reward that fits a preset, and the problem of a
missing file. Never: reads a file, or imports a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from rollart_core.config.base import Seed
from rollart_envs.questions.presets import PRESETS
from rollart_envs.rows import is_hub_id

SPLITS: Final = ("train", "warm", "validation", "test")
SPLIT_NAMES: Final = {name: name for name in SPLITS} | {
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "training": "train",
    "eval": "test",
}
"""Name of a split in a dataset -> the split."""

Name = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Drawn = Literal["warm", "validation", "test"]
SHARES: Final[Mapping[Drawn, float]] = {"warm": 0.05, "validation": 0.1, "test": 0.1}


def _with_defaults(shares: Any) -> Any:
    return {**SHARES, **shares} if isinstance(shares, Mapping) else shares


def _with_training(shares: dict[Drawn, float]) -> dict[Drawn, float]:
    if sum(shares.values()) >= 1:
        raise ValueError(f"add up to {sum(shares.values()):g}; they must leave some for train")
    return shares


Shares = Annotated[
    dict[Drawn, Share], BeforeValidator(_with_defaults), AfterValidator(_with_training)
]
"""Split -> share; splits that are not given have the shares of :data:`SHARES`."""


class QuestionsConfig(BaseModel):
    """Options of ``text/Questions-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str | dict[Name, str] | None = None
    """The dataset (``data=`` is short for this option): a file that ends in `.jsonl`, `.parquet` or
    `.csv`; a folder with such files, named after their splits; a folder of `save_to_disk`; the id
    of a dataset on the Hugging Face hub; or split -> file. If not set: built-in sums, such as
    `What is 17 + 58?`."""
    subset: Name | None = None
    """Subset of a dataset on the hub, such as `main`."""
    preset: Literal["gsm8k", "math", "multiple-choice", "code"] | None = None
    """Format of the rows. It sets the fields, the prompt, and the reward if the run has none."""
    question: Name | None = None
    """Field of a row with the question, a text or a list of messages. If not set, the first of
    `prompt`, `question` and `messages` that the row has."""
    answer: Name | None = None
    """Field with the correct answer: a text, a number, or a list of accepted answers. A dot
    reads inside an object: `reward_model.ground_truth`. If not set, the first of `answer`,
    `reference`, `ground_truth` and `solution` that the row has; without one, the correct answer is
    not known."""
    context: dict[Name, Name] = Field(default_factory=dict)
    """Further data for the run's reward: its key -> field of a row. The reward gets all other
    fields under their own names anyway, and the correct answer under ``reference``."""
    prompt: str | None = None
    """Text before every question. If not set, the text of the preset, or none."""
    split: Name = "split"
    """Field of a row that names its split, if the row has the field."""
    shares: Shares = Field(default_factory=lambda: dict(SHARES))
    """Share of each split that the dataset does not name. Its questions are drawn from ``train`` by
    a hash of the question, so a question stays in its split when rows are added."""
    split_seed: Seed = 0
    """Seed of the hash."""
    duplicates: Literal["refuse", "drop"] = "refuse"
    """What happens if a question is in two splits. ``drop`` keeps it in the held-out split."""

    @field_validator("file", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            return {name: str(path) for name, path in value.items()}
        return value

    @model_validator(mode="after")
    def _of_a_file(self) -> QuestionsConfig:
        for name in _ONLY_WITH_FILE if self.file is None else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name} has no effect without a file; set file, or remove it")
        for name in ("question", "answer") if self.preset else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with a preset; remove one of them")
        if self.subset and not (isinstance(self.file, str) and is_hub_id(self.file)):
            raise ValueError(f"subset has no effect, because {self.file} is not on the hub")
        for name in self.file if isinstance(self.file, dict) else ():
            if name not in SPLIT_NAMES:
                raise ValueError(f"file: {name!r} is not one of {', '.join(SPLITS)}")
        return self

    def missing(self) -> dict[str, str]:
        """Return the problem if a file is missing on this machine."""
        given = self.file.values() if isinstance(self.file, dict) else [self.file]
        for source in given:
            if source and not is_hub_id(source) and not Path(source).expanduser().exists():
                return {"file": f"there is no file {source}"}
        return {}

    def fitting_reward(self) -> Mapping[str, Any] | None:
        """Return the reward of the preset, for a run without another."""
        return PRESETS[self.preset].reward if self.preset else None


_ONLY_WITH_FILE: Final = (
    *("subset", "preset", "question", "answer", "context", "split", "shares", "split_seed"),
    "duplicates",
)
