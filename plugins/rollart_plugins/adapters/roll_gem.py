"""The adapter of classes for ROLL's agentic pipeline; see ``sessions/roll_class.py``.

Takes: options of ``roll-gem::module:Class``. Gives: the config model and the adapter.
Never: imports the class. The session does that, in this Python or in another one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter
from rollart_plugins.adapters.fields import Folder


class RollGemOptions(AdapterOptions):
    """Options of ``roll-gem::module:Class``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, such as `{max_steps: 10}`."""
    path: Folder | None = None
    """A folder from which the module is imported."""


class RollGemAdapter(ForeignAdapter):
    """Classes for ROLL's agentic pipeline: ``module:Class``."""

    session: ClassVar[str] = "roll_class"
    options: ClassVar[type[AdapterOptions]] = RollGemOptions
