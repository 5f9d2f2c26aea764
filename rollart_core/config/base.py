"""What all sections of the run config are made of.

Takes: plain mappings. Gives: the base of all sections, and how a config names a plugin. Never:
knows a section.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MOST = 10**9
"""Largest number where nothing smaller is known to be the limit: a count, or seconds (31 years)."""
MOST_BYTES = 2**50
"""A pebibyte."""
MOST_NAME = 100
"""Characters of a name."""

PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Bytes = Annotated[int, Field(gt=0, le=MOST_BYTES)]
Processes = Annotated[int, Field(gt=0, le=10_000)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Parameters = Annotated[int, Field(gt=0, le=10**15)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=MOST)]
NonNegative = Annotated[float, Field(ge=0, le=MOST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Figure = Annotated[float, Field(gt=0, le=1e24)]
"""What a device does in a second: operations, or bytes."""
LearningRate = Annotated[float, Field(gt=0, le=1)]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value!r} cannot be a name: leave out what cannot be printed")
    return value


Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME), AfterValidator(_printable)]
"""What a person calls something: folders, tables and metrics bear it."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
