"""The options of this package: what a run config may set under `env`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.base }}Config(BaseModel):
    """Options of the task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    highest: Annotated[int, Field(ge=2, le=1000)] = 9
    """The hidden number is between 1 and this."""
    num_guesses: Annotated[int, Field(ge=1, le=4)] = 3
    """How often the agent may guess."""
