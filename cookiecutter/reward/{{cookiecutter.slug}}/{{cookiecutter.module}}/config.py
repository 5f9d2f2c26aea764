"""The options of this package: what a run config may set under `reward`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.class_name }}Config(BaseModel):
    """Options of the reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turn_cost: Annotated[float, Field(ge=0, le=1)] = 0.02
    """What each turn costs an episode that earned something."""
