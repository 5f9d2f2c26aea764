"""The shape of a run's model, before it is loaded or even made.

Takes: the ``model`` section of a run config. Gives: a :class:`ModelShape`, or None for a model that
is not on this machine. Never: downloads anything or imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rollart_core.config import Model, NewModel, RemoteModel
from rollart_core.contracts.hardware import ModelShape

BYTES = {"float32": 4.0, "bfloat16": 2.0}
"""A value takes in each dtype a config may ask for."""


def shape_of(model: Model) -> ModelShape | None:
    """Return the shape of a config's model; None when its ``config.json`` is not here."""
    if isinstance(model, NewModel):
        return _of_new(model)
    if isinstance(model, RemoteModel):
        return None
    folder = Path(model.path).expanduser()
    path = folder / "config.json" if folder.is_dir() else _cached(model.path)
    if path is None or not path.is_file():
        return None
    try:
        return of_config(json.loads(path.read_text(encoding="utf-8")), BYTES[model.dtype])
    except (ValueError, KeyError, TypeError):
        return None


def of_config(config: Mapping[str, Any], bytes_per_value: float) -> ModelShape:
    """Return the shape that a decoder's ``config.json`` describes.

    Parameters are counted for attention with grouped queries, gated feed-forward layers (all
    experts of a mixture) and an embedding that may be tied.

    Raises:
        KeyError: When the config is of another kind of model.
    """
    text = config.get("text_config", config)
    width, num_layers = text["hidden_size"], text["num_hidden_layers"]
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or width // heads
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    ffn = text.get("moe_intermediate_size") or text["intermediate_size"]
    embeddings = text["vocab_size"] * width * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_params=embeddings + num_layers * (attention + experts * 3 * width * ffn),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=bytes_per_value,
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


def _cached(hub_id: str) -> Path | None:
    """Return where the hub's cache on this machine has the ``config.json``."""
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        found = hub.try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # no id of the hub's
        return None
    return Path(found) if isinstance(found, str) else None
