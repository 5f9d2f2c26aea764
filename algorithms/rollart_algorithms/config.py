"""Options of the algorithms. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_TIS_CAP = 2.0


class GRPOConfig(BaseModel):
    """Options of ``rollart/GRPO-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """The ratio is clipped above at ``1 + clip_high`` (clip-higher)."""
    proximal: Literal["recompute", "inference"] = "recompute"
    """Which policy the ratio is taken against: the trainer's own before the first update on the
    batch (tokens are then reweighted, see ``tis_cap``), or the one that sampled the token."""
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """With ``proximal: recompute``: importance weights are truncated at this (None: 2.0)."""
    normalise: Literal["group_std", "none"] = "group_std"
    """Whether advantages are divided by the group's standard deviation."""
    loss_aggregation: Literal["token_mean", "sample_mean", "sample_sum"] = "token_mean"
    """Mean over tokens; or mean over samples of each one's token mean, or of its token sum."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference (the weights RL began with)."""
    zero_advantage: Literal["drop", "keep"] = "drop"
    """Whether samples that teach nothing are dropped from the batch and its divisors, or kept."""

    @model_validator(mode="after")
    def _cap_has_an_effect(self) -> GRPOConfig:
        if self.tis_cap is not None and self.proximal == "inference":
            raise ValueError("tis_cap has no effect with proximal: inference; remove one of them")
        return self
