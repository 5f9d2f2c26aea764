"""Packed rows through any transformers model that takes a custom attention function.

The rows of a microbatch stand one after the other in one input row; position ids restart with each.
Attention is causal within a row and blind across rows: for it the rows are padded to the longest
of their length bucket, and only for it.

Takes: a model and token rows. Gives: logits at chosen tokens. Never: lets a row see another.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollart_core.types import IntArray

NAME = "rollart_packed"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows lie, for attention."""

    gather: tuple[Tensor, ...]
    """For each bucket ``[n, L]``: the token of each slot (0 where padded)."""
    slots: Tensor
    """``[N]``; for each token its slot among those of all buckets, in order."""


def supports(model: nn.Module) -> bool:
    """Return whether packed rows give what the model gives for each row alone."""
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        getattr(model, "_supports_attention_backend", False)
        and "logits_to_keep" in inspect.signature(model.forward).parameters
        and layer_types == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
    )


def install(model: nn.Module) -> None:
    """Make the model use packed attention."""
    AttentionInterface.register(NAME, _attention)
    model.set_attn_implementation(NAME)  # type: ignore[operator]


def layout(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Return where rows of these lengths lie; rows whose lengths differ little share a bucket."""
    starts = np.cumsum([0, *lengths])
    by_size: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_size.setdefault(-(-length // 128), []).append(i)
    gather, slots, first = [], np.empty(starts[-1], dtype=np.int64), 0
    for _, rows in sorted(by_size.items()):
        width = max(lengths[i] for i in rows)
        index = np.zeros((len(rows), width), dtype=np.int64)
        for n, i in enumerate(rows):
            index[n, : lengths[i]] = np.arange(starts[i], starts[i + 1])
            slots[starts[i] : starts[i + 1]] = first + n * width + np.arange(lengths[i])
        gather.append(torch.from_numpy(index).to(device))
        first += index.size
    return PackedRows(tuple(gather), torch.from_numpy(slots).to(device))


def forward(model: nn.Module, rows: Sequence[IntArray], keep: Tensor) -> Tensor:
    """Return the logits ``[K, V]`` after the tokens ``keep`` ``[K]`` of the packed rows."""
    lengths = [len(row) for row in rows]
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(keep.device)
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(keep.device)
    out = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        logits_to_keep=keep,
        use_cache=False,
        packed_rows=layout(lengths, keep.device),
    )
    return out.logits[0]  # type: ignore[no-any-return]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within rows; ``[1, H, N, D]`` in, ``[1, N, H, D]`` out."""
    if packed_rows is None or any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError(
            f"{type(module).__name__} asks more of attention than packing has"
        )
    outs = []
    for index in packed_rows.gather:
        q, k, v = (t[0].transpose(0, 1)[index].transpose(1, 2) for t in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[packed_rows.slots][None], None
