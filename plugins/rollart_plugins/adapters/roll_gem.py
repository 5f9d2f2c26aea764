"""The adapter of classes written for ROLL's agentic pipeline: see ``sessions/roll_class.py``."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class RollGemOptions(AdapterOptions):
    """Options of ``roll-gem::module:Class``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, such as `{max_steps: 10}`."""
    path: str | None = None
    """A folder to import the module from."""

    @field_validator("path")
    @classmethod
    def _is_there(cls, value: str | None) -> str | None:
        folder = None if value is None else os.path.abspath(os.path.expanduser(value))
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"there is no folder {value}")
        return folder


class RollGemAdapter(ForeignAdapter):
    """Classes written for ROLL's agentic pipeline: ``module:Class``."""

    session: ClassVar[str] = "roll_class"
    options: ClassVar[type[AdapterOptions]] = RollGemOptions
