"""The adapter of Reasoning Gym: see ``sessions/reasoning_gym_sets.py`` for what it does.

Takes: options of ``reasoning-gym::DATASET``. Gives: their model, and the adapter. Never: makes or
imports what is foreign: the session does, here or in another Python.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class ReasoningGymOptions(AdapterOptions):
    """Options of ``reasoning-gym::DATASET``."""

    dataset: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own configuration, such as `{max_animals: 3}`."""
    extract: Literal["auto", "tag", "text"] = "auto"
    """What of an action is the answer. `tag`: what stands in the last `<answer>...</answer>`;
    `text`: all of it; `auto`: the tag where there is one, else all of it."""


class ReasoningGymAdapter(ForeignAdapter):
    """Datasets of ``reasoning_gym``: one question, one answer, scored by the dataset."""

    session: ClassVar[str] = "reasoning_gym_sets"
    options: ClassVar[type[AdapterOptions]] = ReasoningGymOptions
    module: ClassVar[str] = "reasoning_gym"
    package: ClassVar[str] = "reasoning-gym"
