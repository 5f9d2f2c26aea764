"""The architecture of a model for our own decoder, read from its ``config.json``.

Takes: a model folder. Gives: a :class:`Architecture`, or None for a model that only transformers
can run. Never: imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart_core.errors import ConfigError

OWN_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Decoders with RMS norm, rotary positions, grouped queries and SwiGLU."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a Llama, Mistral, Qwen2 or Qwen3 decoder."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    """The output matrix is the embedding."""
    qk_norm: bool

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a model folder.

    Raises:
        ConfigError: If there is none, or it is not a model's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is not a model: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ConfigError(f"{str(path)!r} is not JSON: {e}") from e
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{str(path)!r} names no model_type; is it a Hugging Face model?")
    return config


def own_architecture(config: dict[str, Any]) -> Architecture | None:
    """Return the shape our decoder needs, or None when it cannot run this model exactly."""
    if config["model_type"] not in OWN_MODEL_TYPES or not _is_plain(config):
        return None
    heads = config["num_attention_heads"]
    return Architecture(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_width=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope(config).get("rope_theta") or config.get("rope_theta", 10000.0),
        max_positions=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=config["model_type"] == "qwen3",
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under their present name or the older one."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _is_plain(config: dict[str, Any]) -> bool:
    """True without long-context rope variants, sliding windows, quantisation, other activations."""
    rope = _rope(config)
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ["full_attention"])
    return (
        rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and config.get("partial_rotary_factor", 1.0) == 1.0
        and not window
        and kinds == {"full_attention"}
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("quantization_config")
    )
