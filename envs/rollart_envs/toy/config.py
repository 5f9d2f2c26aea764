"""Options of the toy environments.

Takes: plain values. Gives: checked, frozen config models. Never: imports gymnasium or torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import PositiveInt, Seed


class _GridConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hint: bool = True
    """Say on the first page of an episode what the letters mean and which words are moves."""


class FrozenLakeConfig(_GridConfig):
    """Options of ``toy/FrozenLake-v1``."""

    size: Annotated[int, Field(ge=4, le=16)] = 4
    """Cells along each side (smaller lakes are too few to split)."""
    slippery: bool = False
    """Move as told only a third of the time, else to one side or the other."""
    hole_probability: Annotated[float, Field(gt=0, lt=0.6)] = 0.2
    """Chance of each cell to be a hole (lakes without a path are drawn anew)."""
    max_turns: PositiveInt = 20
    """Turns after which an episode is truncated."""


class SokobanConfig(_GridConfig):
    """Options of ``toy/Sokoban-v1``."""

    size: Annotated[int, Field(ge=3, le=8)] = 4
    """Cells along each side, the surrounding wall not counted."""
    num_boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """Boxes, and as many targets."""
    wall_probability: Annotated[float, Field(ge=0, le=0.4)] = 0.1
    """Chance of each cell to be a wall (rooms that fall apart are drawn anew)."""
    num_pulls: Annotated[int, Field(ge=1, le=50)] = 4
    """How often, at most, a box was pulled to make the level from its solution: the difficulty."""
    max_turns: PositiveInt = 40
    """Turns after which an episode is truncated; every level can be solved within them."""


class StockConfig(BaseModel):
    """Options of ``toy/Stock-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    most: Annotated[int, Field(ge=1, le=999)] = 9
    """Largest number of things in stock."""


class BanditConfig(BaseModel):
    """Options of ``toy/Bandit-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arms: Annotated[int, Field(ge=2, le=8)] = 4
    """Arms that are shown; one of them pays 1."""
    signs: Annotated[int, Field(ge=1, le=8)] = 1
    """Signs there are. With more than one, which arm pays hangs on the sign that is shown (a
    contextual bandit): much slower to learn."""
    turns: Annotated[int, Field(ge=1, le=8)] = 1
    """Pulls of an episode, each under a sign of its own; success is to be right in all of them."""
    secret: Seed | None = 0
    """Draws which arm pays under which sign, the same in all tasks. None: drawn anew for each task,
    so that its expert teaches the form of the game and nothing else."""
    expert: Literal["best", "any"] = "best"
    """Which arm the expert pulls. ``any``: one at random, which is then the one that pays, in that
    episode alone: a warm start teaches the form of the game and nothing else."""
    decoy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """What the second best arm of a sign pays."""
    best_fails: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Chance of the best arm to get stuck, in training tasks."""
    others_fail: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Chance of each other arm to get stuck, in training tasks."""
    failures: Literal["raise", "zero"] = "raise"
    """What a stuck arm does: raise, as broken environments do; or end the episode with a reward of
    0, as it is when an environment keeps its failures to itself."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> BanditConfig:
        if self.secret is None and self.expert == "any":
            raise ValueError("expert: any has no effect with secret: null; remove one of them")
        if self.failures == "zero" and not (self.best_fails or self.others_fail):
            raise ValueError("failures: zero has no effect where no arm fails: set best_fails")
        return self
