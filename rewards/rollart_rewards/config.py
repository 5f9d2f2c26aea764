"""Options of the reward that is the environment's own return. Never imports torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rollart_core.config.base import NonNegative


class EnvReturnConfig(BaseModel):
    """Options of ``rollart/EnvReturn-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    return_weight: NonNegative = 1.0
    """Weight of the sum of the environment's rewards."""
    success_weight: NonNegative = 0.0
    """Weight of its success (1 or 0); above 0 the environment must say ``info["success"]``."""
