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
    """Whether the first page of an episode explains the letters and the moves."""


class FrozenLakeConfig(_GridConfig):
    """Options of ``toy/FrozenLake-v1``."""

    size: Annotated[int, Field(ge=4, le=16)] = 4
    """Cells along each side. Smaller lakes have too few levels to split."""
    slippery: bool = False
    """If true, a move goes as asked only a third of the time, else to one side or the other."""
    hole_probability: Annotated[float, Field(gt=0, lt=0.6)] = 0.2
    """Probability that a cell is a hole. Lakes without a path are drawn again."""
    max_turns: PositiveInt = 20
    """Turns after which an episode is truncated."""


class SokobanConfig(_GridConfig):
    """Options of ``toy/Sokoban-v1``."""

    size: Annotated[int, Field(ge=3, le=8)] = 4
    """Cells along each side, without the surrounding wall."""
    num_boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """Number of boxes, and of targets."""
    wall_probability: Annotated[float, Field(ge=0, le=0.4)] = 0.1
    """Probability that a cell is a wall. Rooms with separated parts are drawn again."""
    num_pulls: Annotated[int, Field(ge=1, le=50)] = 4
    """Maximum number of pulls that make the level from its solution: the difficulty."""
    max_turns: PositiveInt = 40
    """Turns after which an episode is truncated; every level can be solved within them."""


class StockConfig(BaseModel):
    """Options of ``toy/Stock-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    most: Annotated[int, Field(ge=1, le=999)] = 9
    """Largest number of items in stock."""


class BanditConfig(BaseModel):
    """Options of ``toy/Bandit-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arms: Annotated[int, Field(ge=2, le=8)] = 4
    """Number of arms. One of them pays 1."""
    signs: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of signs. With more than one, the arm that pays depends on the sign that is shown (a
    contextual bandit), which is much slower to learn."""
    turns: Annotated[int, Field(ge=1, le=8)] = 1
    """Pulls per episode, each under its own sign. Success means that all of them are right."""
    secret: Seed | None = 0
    """Draws which arm pays under which sign, the same in all tasks. null: drawn again for each
    task, so that the expert teaches only the form of the game."""
    expert: Literal["best", "any"] = "best"
    """The arm that the expert pulls. ``any``: a random arm, which then pays in that episode only.
    A warm start then teaches only the form of the game."""
    decoy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Reward of the second best arm of a sign."""
    best_fails: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that the best arm gets stuck, in training tasks."""
    others_fail: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that each other arm gets stuck, in training tasks."""
    failures: Literal["raise", "zero"] = "raise"
    """What a stuck arm does. ``raise``: it raises an error, as broken environments do. ``zero``: it
    ends the episode with a reward of 0, as environments do that hide their failures."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> BanditConfig:
        if self.secret is None and self.expert == "any":
            raise ValueError("expert: any has no effect with secret: null; remove one of them")
        if self.failures == "zero" and not (self.best_fails or self.others_fail):
            raise ValueError("failures: zero has no effect if no arm can fail: set best_fails")
        return self
