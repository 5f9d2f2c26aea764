"""Options of ``text/Questions-v1``, as a pydantic model that imports nothing heavy.

Takes: plain values. Gives: a frozen model. Never: reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_envs.files import missing_files

Name = Annotated[str, Field(min_length=1)]


class QuestionsConfig(BaseModel):
    """Options of ``text/Questions-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path | None = None
    """Rows, `.jsonl` or `.parquet`; none: sums of RollArt's own, such as `What is 17 + 58?`."""
    question: Name = "question"
    """Field of a row that holds the question."""
    context: dict[Name, Name] = Field(default_factory=lambda: {"reference": "answer"})
    """What the run's reward is told (``info["reward_context"]``): its key -> field of a row. Under
    ``reference`` stands the right answer, with which the environment compares by itself."""
    prompt: str = ""
    """Said before every question."""

    @model_validator(mode="after")
    def _of_a_file(self) -> QuestionsConfig:
        for name in ("question", "context"):
            is_other = getattr(self, name) != getattr(_DEFAULTS, name)
            if self.file is None and is_other:
                raise ValueError(f"{name} has no effect without a file")
        return self

    def missing(self) -> dict[str, str]:
        """Return the file that this machine has not."""
        return missing_files(file=self.file)


_DEFAULTS = QuestionsConfig.model_construct()
