"""The adapter of classes written for ROLL's agentic pipeline: see ``sessions/roll_class.py``.

Takes: options of ``roll-gem::module:Class``. Gives: their model, and the adapter. Never: makes or
imports what is foreign: the session does, here or in another Python.
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
    """A folder to import the module from."""


class RollGemAdapter(ForeignAdapter):
    """Classes written for ROLL's agentic pipeline: ``module:Class``."""

    session: ClassVar[str] = "roll_class"
    options: ClassVar[type[AdapterOptions]] = RollGemOptions
