"""Sections that say which model is trained or scored; and for the planner what shape it has.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: looks for a file of a model, or imports torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

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


class ModelPath(Section):
    """A model that exists: a local folder or a hub id."""

    case: ClassVar[str] = "a model that exists (no model.kind)"

    path: str
    """A folder with a ``config.json``, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in engine and trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device, else the CPU."""
    shape: Shape | None = None
    """For the planner, while its ``config.json`` is not on this machine; none: the cluster file may
    have it."""


class NewModel(Section):
    """A small Qwen3-architecture model from nothing, with a tokenizer trained on the env's text."""

    case: ClassVar[str] = "model.kind: new"

    kind: Literal["new"] = "new"
    """Says that a model is to be made."""
    num_layers: Annotated[int, Field(gt=0, le=1_000)] = 3
    """Decoder layers."""
    width: Annotated[int, Field(gt=0, le=1_000_000)] = 128
    """Of the residual stream."""
    num_heads: Annotated[int, Field(gt=0, le=1_024)] = 2
    """Query heads."""
    num_kv_heads: Annotated[int, Field(gt=0, le=1_024)] = 1
    """Key and value heads; ``num_heads`` is a multiple of them."""
    head_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 64
    """Even, for rotary embeddings turn pairs."""
    ffn_width: Annotated[int, Field(gt=0, le=1_000_000)] = 384
    """Of the SwiGLU layer."""
    vocab_size: Annotated[int, Field(gt=0, le=1_000_000)] = 1024
    """Most tokens; the environment's own text may give fewer."""
    max_positions: Annotated[int, Field(gt=0, le=10_000_000)] = 4096
    """Longest token row the model says it can read."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in engine and trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device, else the CPU."""

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> NewModel:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        return self


class RemoteModel(Section):
    """A model whose tokens only its server knows: messages in, text out (`rollart eval` alone)."""

    case: ClassVar[str] = "model.kind: remote"

    kind: Literal["remote"] = "remote"
    """Says that there are no files of it here; which model it is, ``engine`` says."""


def _which_model(value: object) -> str:
    """Return the class of a ``model`` section: all but a model in files say what they are."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if kind == "remote":
        return "RemoteModel"
    return "NewModel" if kind == "new" else "ModelPath"


Model = Annotated[
    Annotated[ModelPath, Tag("ModelPath")]
    | Annotated[NewModel, Tag("NewModel")]
    | Annotated[RemoteModel, Tag("RemoteModel")],
    Discriminator(_which_model),
]
