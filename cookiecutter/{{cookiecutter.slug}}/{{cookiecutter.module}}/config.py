"""The options of this package, for the sections `env` and `reward` of a run config."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.base }}Config(BaseModel):
    """Options of the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[int, Field(ge=3, le=10)] = 4
    """Number of cells per side."""
    wall_probability: Annotated[float, Field(ge=0, le=0.4)] = 0.2
    """Probability that a cell is a wall."""
    max_turns: Annotated[int, Field(ge=6)] = 10
    """Maximum number of turns before the episode is truncated."""
    hint: bool = True
    """Whether the first observation explains the task."""


class {{ cookiecutter.base }}RewardConfig(BaseModel):
    """Options of the reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    detour_cost: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Cost of each turn beyond the shortest path."""
