"""The options of this package, for the section `reward` of a run config."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.class_name }}Config(BaseModel):
    """Options of the reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turn_cost: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Cost of each turn of an episode with a return above 0."""
