"""The adapter of gem (``gem-llm``); see ``sessions/gem.py``.

Takes: options of ``gem::ID``. Gives: the config model and the adapter.
Never: imports gem. The session does that, in this Python or in another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class GemOptions(AdapterOptions):
    """Options of ``gem::ID``."""

    make: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gem.make`, such as `{max_turns: 5}`."""
    dataset: str | None = None
    """A .jsonl file of questions for ids that start with `math:`, `code:`, `logic:`, `qa:` and
    `eval:`. `{split}` is replaced by the name of the split. If not set, gem downloads its own
    dataset."""

    @field_validator("dataset")
    @classmethod
    def _from_anywhere(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())


class GemAdapter(ForeignAdapter):
    """Environments of ``gem.make``."""

    session: ClassVar[str] = "gem"
    options: ClassVar[type[AdapterOptions]] = GemOptions
    module: ClassVar[str] = "gem"
    package: ClassVar[str] = "gem-llm"
