"""The shape of a model, and what an episode asks of it, where a file says it: for the planner.

Takes: plain mappings. Gives: frozen sections. Never: reads a model.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollart_core.config.base import (
    MOST,
    Count,
    NonNegative,
    Parameters,
    Positive,
    PositiveInt,
    Section,
)


class Shape(Section):
    """The shape of a decoder, for a model whose ``config.json`` may not be on this machine."""

    num_params: Parameters
    """All parameters."""
    num_layers: PositiveInt
    """Decoder layers."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Width of a head."""
    num_active_params: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Of a mixture of experts: parameters that one token goes through."""
    num_experts: Count = 0
    """Of a mixture: experts of a layer."""
    experts_per_token: Count = 0
    """Of a mixture: experts of a layer that one token goes through."""
    width: Count = 0
    """Of the residual stream; 0: ``num_heads`` times ``head_dim``."""
    vocab_size: Count = 0
    """Tokens; 0: what logits take is not reckoned."""
    num_outer_params: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Parameters outside of the layers, embeddings and head; 0: taken to be few."""

    @model_validator(mode="after")
    def _mixture_is_whole(self) -> Shape:
        mixture = (self.num_active_params, self.num_experts, self.experts_per_token)
        if any(mixture) and not all(mixture):
            raise ValueError(
                "a mixture of experts needs all of num_active_params, num_experts and "
                "experts_per_token; leave all three out for a dense model"
            )
        if self.num_active_params > self.num_params:
            raise ValueError(
                f"num_active_params ({self.num_active_params}) cannot be above num_params "
                f"({self.num_params})"
            )
        if self.experts_per_token >= self.num_experts > 0:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be below num_experts "
                f"({self.num_experts})"
            )
        if self.num_outer_params >= self.num_params:
            raise ValueError(
                f"num_outer_params ({self.num_outer_params}) must be below num_params "
                f"({self.num_params})"
            )
        return self


class RequestedWorkload(Section):
    """What an episode asks of the hardware, where it is known better than the spec declares it."""

    prefill_tokens: NonNegative
    """Tokens a turn adds to the prompt."""
    decode_tokens: Positive
    """Tokens sampled a turn."""
    turns: Annotated[float, Field(ge=1, le=MOST)]
    """Of an episode."""
    env_s: NonNegative = 0.0
    """Seconds of the environment a turn."""
    reward_s: NonNegative = 0.0
    """Seconds of scoring an episode."""
