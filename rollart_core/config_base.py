"""What all sections of the run config are made of.

Takes: plain mappings. Gives: the base of all sections, and how a config names a plugin. Never:
knows a section.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: ClassVar[str] = ""
    """Where a section is one of several: what in the file selects it. Error messages say it."""


class PluginRef(BaseModel):
    """A plugin by id, alias or ``module:Class``; all other keys are its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    """What plugin: `rollart list` shows them."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's own keys."""
        return dict(self.model_extra or {})
