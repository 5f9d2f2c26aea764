"""Sections of a run config that say which model is trained or scored.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config` makes a run
config. Never: looks for a file of it, or imports torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Tag

from rollart_core.config_base import PositiveInt, Section
from rollart_core.config_shape import Shape


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
    num_layers: PositiveInt = 3
    """Decoder layers."""
    width: PositiveInt = 128
    """Of the residual stream."""
    num_heads: PositiveInt = 2
    """Query heads."""
    num_kv_heads: PositiveInt = 1
    """Key and value heads; ``num_heads`` is a multiple of them."""
    head_dim: PositiveInt = 64
    """Even."""
    ffn_width: PositiveInt = 384
    """Of the SwiGLU layer."""
    vocab_size: PositiveInt = 1024
    """Most tokens; the environment's own text may give fewer."""
    max_positions: PositiveInt = 4096
    """Longest token row the model says it can read."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in engine and trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device, else the CPU."""


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
