"""The shape of a run's model, before it is loaded or even made.

Takes: the ``model`` section of a run config. Gives: a :class:`ModelShape`, or None for a model that
is not on this machine and whose section does not say it. Never: downloads anything or imports
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart_core.config.model import Model, NewModel, RemoteModel
from rollart_core.config.validation.consistency import hub_cached
from rollart_core.contracts.hardware import ModelShape
from rollart_core.errors import ConfigError

BYTES = {"float32": 4.0, "bfloat16": 2.0}
"""A value takes in each dtype a config may ask for."""
ROUNDED = 0.05
"""By so much of itself a number of parameters in a config may be off."""


def shape_of(model: Model) -> ModelShape | None:
    """Return the shape of a config's model; None when it is not known here.

    Raises:
        ConfigError: When its ``config.json`` is here and says otherwise than the config.
    """
    if isinstance(model, NewModel):
        return _of_new(model)
    if isinstance(model, RemoteModel):
        return None
    folder = Path(model.path).expanduser()
    path = folder / "config.json" if folder.is_dir() else hub_cached(model.path)
    num_bytes, said = BYTES[model.dtype], None
    if model.shape:
        said = ModelShape(**model.shape.model_dump(), bytes_per_value=num_bytes)
    if path is None or not path.is_file():
        return said
    try:
        read = of_config(json.loads(path.read_text(encoding="utf-8")), num_bytes)
    except (ValueError, KeyError, TypeError):
        return said
    if said is not None:
        _check_alike(said, read, path)
    return read


def of_config(config: Mapping[str, Any], bytes_per_value: float) -> ModelShape:
    """Return the shape that a decoder's ``config.json`` describes.

    Parameters are counted for attention with grouped queries, gated feed-forward layers (all
    experts of a mixture, of which a token goes through some) and an embedding that may be tied;
    norms and routers, under a thousandth of all, are left out.

    Raises:
        KeyError: When the config is of another kind of model.
    """
    text = config.get("text_config", config)
    width, num_layers = text["hidden_size"], text["num_hidden_layers"]
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or width // heads
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    per_token = text["num_experts_per_tok"] if experts else 0
    ffn = (experts and text.get("moe_intermediate_size")) or text["intermediate_size"]
    expert = 3 * width * ffn
    embeddings = text["vocab_size"] * width * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_params=embeddings + num_layers * (attention + max(1, experts) * expert),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=bytes_per_value,
        num_active_params=embeddings + num_layers * (attention + per_token * expert)
        if experts
        else 0,
        num_experts=experts,
        experts_per_token=per_token,
        width=width,
        num_outer_params=embeddings,
        vocab_size=text["vocab_size"],
    )


def _check_alike(said: ModelShape, read: ModelShape, path: Path) -> None:
    """Refuse a shape in the config that is another model's; counts of parameters may be rounded."""
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts"):
        if getattr(said, name) != getattr(read, name):
            raise ConfigError(
                f"model.shape.{name} is {getattr(said, name)}, and {path} says "
                f"{getattr(read, name)}: correct it, or remove model.shape"
            )
    if abs(said.num_params / read.num_params - 1) > ROUNDED:
        raise ConfigError(
            f"model.shape.num_params is {said.num_params:,}, and {path} comes to "
            f"{read.num_params:,}: correct it, or remove model.shape"
        )


def _of_new(model: NewModel) -> ModelShape:
    config = {
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_width,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": True,
    }
    return of_config(config, BYTES[model.dtype])
