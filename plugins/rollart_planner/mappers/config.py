"""Options of the hardware mappers, as pydantic models without heavy imports.

Takes: the section ``mapper`` of a run. Gives: a model for each mapper with options. Never: checks
against the pools; the mapper does.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Positive, Seed

Share = Positive


class StaticConfig(BaseModel):
    """Options of `static`. Defaults to the first pool that has a device and the role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    envs: dict[str, str] = Field(default_factory=dict)
    """Env -> pool of its workers. `*` stands for all others."""
    engines: dict[str, str | dict[str, Share]] = Field(default_factory=dict)
    """Env -> pool that generates for it, or pool -> share. `*` stands for all others."""
    trainer: str | None = None
    """Pool of the trainer."""
    rewards: str = "inline"
    """`inline`: on the env workers; or the name of a serverless pool."""


class RandomConfig(BaseModel):
    """Options of `random`, a baseline to compare placements with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: Seed = 0
    """The same seed, workloads and pools give the same placement."""
