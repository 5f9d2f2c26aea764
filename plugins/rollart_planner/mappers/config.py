"""Options of the hardware mappers, as pydantic models that import nothing heavy.

Takes: what stands under ``mapper`` of a run. Gives: a model for each mapper with options. Never:
knows the pools; the mapper says what does not fit them.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Positive, Seed

Share = Positive


class StaticConfig(BaseModel):
    """Options of `static`. What they leave out goes to the first pool with a device and a role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    envs: dict[str, str] = Field(default_factory=dict)
    """Env -> pool of its workers; `*` stands for all others."""
    engines: dict[str, str | dict[str, Share]] = Field(default_factory=dict)
    """Env -> pool that generates for it, or pool -> share; `*` stands for all others."""
    trainer: str | None = None
    """Pool of the trainer."""
    rewards: str = "inline"
    """`inline`: beside the environments; or a serverless pool."""


class RandomConfig(BaseModel):
    """Options of `random`: what a placement is worth comparing with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: Seed = 0
    """The same seed, workloads and pools give the same placement."""
