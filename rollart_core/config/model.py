"""Sections of a run config for the model to train or score, and its shape for planning.

Takes: plain mappings. Gives: frozen sections, which :mod:`rollart_core.config.run` uses. Never:
reads a model's files or imports torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

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
    """Shape of a decoder model whose ``config.json`` may not be on this machine."""

    num_params: Parameters
    """Total number of parameters."""
    num_layers: PositiveInt
    """Number of decoder layers."""
    num_heads: PositiveInt
    """Number of query heads."""
    num_kv_heads: PositiveInt
    """Number of key and value heads."""
    head_dim: PositiveInt
    """Dimension of each head."""
    num_active_params: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Number of parameters that one token uses (mixture of experts only)."""
    num_experts: Count = 0
    """Number of experts per layer (mixture of experts only)."""
    experts_per_token: Count = 0
    """Number of experts per layer that one token uses (mixture of experts only)."""
    width: Count = 0
    """Width of the residual stream. If 0, it is ``num_heads`` times ``head_dim``."""
    vocab_size: Count = 0
    """Number of tokens in the vocabulary. If 0, the plan ignores the memory of logits."""
    num_outer_params: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Number of parameters outside of the layers (embeddings and head). If 0, the plan assumes
    few."""

    @model_validator(mode="after")
    def _mixture_is_whole(self) -> Shape:
        mixture = (self.num_active_params, self.num_experts, self.experts_per_token)
        if any(mixture) and not all(mixture):
            raise ValueError(
                "a mixture of experts needs num_active_params, num_experts and "
                "experts_per_token; remove all three for a dense model"
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
    """Hardware demand of an episode, which replaces the values of the environment's spec."""

    prefill_tokens: NonNegative
    """Number of tokens that a turn adds to the prompt."""
    decode_tokens: Positive
    """Number of sampled tokens per turn."""
    turns: Annotated[float, Field(ge=1, le=MOST)]
    """Number of turns per episode."""
    env_s: NonNegative = 0.0
    """Seconds that the environment takes per turn."""
    reward_s: NonNegative = 0.0
    """Seconds of scoring per episode."""


class ModelPath(Section):
    """An existing model: a local folder or a hub id."""

    case: ClassVar[str] = "a model that exists (no model.kind)"

    path: str
    """Folder with a ``config.json``, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights, in the engine and in the trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. ``auto`` uses CUDA if a device is available, otherwise the CPU."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of the chat template's own variables, such as ``enable_thinking: false``. They apply
    wherever the template is used. An unknown variable is an error."""
    shape: Shape | None = None
    """Shape of the model for planning if its ``config.json`` is not on this machine. If not set,
    the cluster file may define it."""


class NewModel(Section):
    """A new small Qwen3-architecture model, with a tokenizer trained on the environment's text."""

    case: ClassVar[str] = "model.kind: new"

    kind: Literal["new"] = "new"
    """Selects a new model."""
    num_layers: Annotated[int, Field(gt=0, le=1_000)] = 3
    """Number of decoder layers."""
    width: Annotated[int, Field(gt=0, le=1_000_000)] = 128
    """Width of the residual stream."""
    num_heads: Annotated[int, Field(gt=0, le=1_024)] = 2
    """Number of query heads."""
    num_kv_heads: Annotated[int, Field(gt=0, le=1_024)] = 1
    """Number of key and value heads. It must divide ``num_heads``."""
    head_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 64
    """Dimension of each head. It must be even because rotary embeddings rotate pairs."""
    ffn_width: Annotated[int, Field(gt=0, le=1_000_000)] = 384
    """Width of the SwiGLU layer."""
    vocab_size: Annotated[int, Field(gt=0, le=1_000_000)] = 1024
    """Maximum number of tokens in the vocabulary. The environment's text may yield fewer."""
    max_positions: Annotated[int, Field(gt=0, le=10_000_000)] = 4096
    """Maximum number of tokens in a row that the model declares to support."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights, in the engine and in the trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. ``auto`` uses CUDA if a device is available, otherwise the CPU."""

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> NewModel:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        return self


class RemoteModel(Section):
    """A model that only its server can tokenize: text in, text out (`rollart eval` only)."""

    case: ClassVar[str] = "model.kind: remote"

    kind: Literal["remote"] = "remote"
    """Selects a model without local files. ``engine`` selects the server and the model."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of variables of the server's chat template, sent with each request. Servers such as
    vLLM and SGLang use them."""


def _which_model(value: object) -> str:
    """Return the class name for a ``model`` section; a section without ``kind`` is a path."""
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
