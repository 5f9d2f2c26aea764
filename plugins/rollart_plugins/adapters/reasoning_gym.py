"""The adapter of Reasoning Gym; see ``sessions/reasoning_gym_sets.py``.

Takes: options of ``reasoning-gym::DATASET``. Gives: the config model and the adapter.
Never: imports Reasoning Gym. The session does that, in this Python or in another one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class ReasoningGymOptions(AdapterOptions):
    """Options of ``reasoning-gym::DATASET``."""

    dataset: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the dataset, such as `{max_animals: 3}`."""
    extract: Literal["auto", "tag", "text"] = "auto"
    """Which text of an action is the answer. `tag`: the content of the last `<answer>...</answer>`.
    `text`: the whole action. `auto`: the tag if there is one, otherwise the whole action."""


class ReasoningGymAdapter(ForeignAdapter):
    """Datasets of ``reasoning_gym``: one question and one answer, scored by the dataset."""

    session: ClassVar[str] = "reasoning_gym_sets"
    options: ClassVar[type[AdapterOptions]] = ReasoningGymOptions
    module: ClassVar[str] = "reasoning_gym"
    package: ClassVar[str] = "reasoning-gym"
