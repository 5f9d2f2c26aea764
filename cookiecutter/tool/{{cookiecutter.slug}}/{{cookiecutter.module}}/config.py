"""The options of this package, for the section `env` of a run config."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.base }}Config(BaseModel):
    """Options of the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    people: Annotated[int, Field(ge=1, le=10)] = 8
    """Number of people in the directory."""
