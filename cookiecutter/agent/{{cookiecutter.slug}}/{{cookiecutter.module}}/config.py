"""The options of this package, for the section `env` of a run config."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.base }}Config(BaseModel):
    """Options of the task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    highest: Annotated[int, Field(ge=2, le=1000)] = 9
    """Maximum of the hidden number. The minimum is 1."""
    num_guesses: Annotated[int, Field(ge=1, le=4)] = 3
    """Maximum number of guesses."""
