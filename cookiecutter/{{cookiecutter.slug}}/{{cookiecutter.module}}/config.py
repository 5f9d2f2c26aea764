"""The options of this package: what a run config may set under `env` and `reward`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.base }}Config(BaseModel):
    """Options of the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[int, Field(ge=3, le=10)] = 4
    """Cells along each side."""
    wall_probability: Annotated[float, Field(ge=0, le=0.4)] = 0.2
    """Chance of each cell to be a wall."""
    max_turns: Annotated[int, Field(ge=6)] = 10
    """Turns after which an episode is truncated."""
    hint: bool = True
    """Explain the task on the first page."""


class {{ cookiecutter.base }}RewardConfig(BaseModel):
    """Options of the reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    detour_cost: Annotated[float, Field(ge=0, le=1)] = 0.05
    """What each turn beyond the shortest way costs."""
