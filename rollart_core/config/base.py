"""Define the base of all run config sections, and references to plugins.

Takes: plain mappings. Gives: the base class of sections, bounded number types, and
:class:`PluginRef`. Never: depends on a concrete section.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rollart_core.plugins.old_names import REMOVED_IN

MOST = 10**9
"""Upper limit for a count, or for seconds (31 years), that has no smaller known limit."""
MOST_BYTES = 2**50
"""Upper limit for a number of bytes: one pebibyte."""
MOST_NAME = 100
"""Maximum number of characters in a name."""

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
"""Operations or bytes per second of a device."""
LearningRate = Annotated[float, Field(gt=0, le=1)]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value!r} cannot be a name: remove the unprintable characters")
    return value


Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME), AfterValidator(_printable)]
"""A name chosen by the user. Folders, tables and metrics use it."""


def old_names(**names: str) -> Any:
    """Return a validator of a model that also accepts keys by their previous names.

    Args:
        names: Previous name -> name of the key. A previous name causes a ``FutureWarning``.
    """

    def accept(value: Any) -> Any:
        for old, new in names.items():
            if isinstance(value, Mapping) and old in value:
                text = f"{old} is now {new}; RollArt {REMOVED_IN} removes the old name"
                warnings.warn(text, FutureWarning, stacklevel=2)
                if new in value:
                    raise ValueError(f"{old} is the previous name of {new}: remove {old}")
                value = {new if key == old else key: one for key, one in value.items()}
        return value

    return model_validator(mode="before")(staticmethod(accept))


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    case: ClassVar[str] = ""
    """How the config file selects this section among its alternatives. Error messages use it."""


class PluginRef(BaseModel):
    """A plugin by id, alias or ``module:Class``; all other keys are its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    """The plugin's id, alias or ``module:Class``. `rollart list` shows all ids."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are options of the plugin."""
        return dict(self.model_extra or {})
