"""Sections of a run config that say which model is trained or scored.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: looks for a file of it, or imports torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rollart_core.config.base import Section
from rollart_core.config.model_shape import Shape


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
