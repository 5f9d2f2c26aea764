"""The functions between a decoder's matrix products: normalisation, rotation, cache, attention.

:class:`NativeOps` calls the compiled float32 kernels, on the CPU; a row's result never depends on
the rows beside it. :class:`TorchOps` is plain torch, for CUDA or without a compiler; with
``deterministic`` each row attends alone, in blocks of a fixed number of rows, over a key length
that its own position decides.

Takes: packed rows and their layout. Gives: results in place or in given buffers. Never: holds
weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from rollart_cpu.inference.architecture import Architecture
from rollart_cpu.inference.layout import Items, Layout

KEY_BLOCK = 16


class Ops(Protocol):
    """See :class:`NativeOps` and :class:`TorchOps`."""

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``x += residual``, then ``out = rms_norm(x) * weight``; ``[N, D]``."""

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        layout: Layout,
    ) -> None:
        """Normalise and rotate q and k of ``[N, qkv_width]`` in place; put k and v in the cache."""

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor, items: Items) -> None:
        """Attention of all items' rows; ``out`` is ``[N, heads * head_dim]``."""

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out = silu(gate) * up``; ``[N, 2 F]`` to ``[N, F]``."""

    def clear(self, slot: int) -> None:
        """Wipe a slot that may hold values that are not finite."""

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of a slot, in all layers."""


KEY_BUCKET = 64
FIXED_ROWS = 64


class TorchOps:
    """Normalisation, rotation, cache and attention of one decoder."""

    def __init__(
        self,
        shape: Architecture,
        rope: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
        max_tokens: int,
        *,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self._shape, self._deterministic = shape, deterministic
        self._cos, self._sin = rope
        self._device = self._cos.device
        span = -(-max_tokens // KEY_BUCKET) * KEY_BUCKET
        size = (shape.num_layers, num_slots, shape.num_kv_heads, span, shape.head_dim)
        self._keys = torch.zeros(size, dtype=dtype, device=self._device)
        self._values = torch.zeros(size, dtype=dtype, device=self._device)

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``x += residual``, then ``out = rms_norm(x) * weight``; ``[N, D]``."""
        if residual is not None:
            x += residual
        out.copy_(self._rms(x, weight))

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._shape.norm_eps)
        return weight * (wide * scale).to(x.dtype)

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        layout: Layout,
    ) -> None:
        """Normalise and rotate q and k of ``[N, qkv_width]`` in place; put k and v in the cache."""
        q, k, v = self._split(qkv)
        slots, positions = self._index(layout.slots), self._index(layout.positions)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        for part, weight in zip((q, k), norms, strict=True):
            x = part if weight is None else self._rms(part, weight)
            a, b = x.float().chunk(2, dim=-1)
            part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        self._keys[layer][slots, :, positions] = k
        self._values[layer][slots, :, positions] = v

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views ``[N, heads, head_dim]`` of q, k and v."""
        s = self._shape
        heads = qkv.view(qkv.shape[0], -1, s.head_dim)
        sizes = [s.num_heads, s.num_kv_heads, s.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        return q, k, v

    def _index(self, array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor, items: Items) -> None:
        """Attention of all items' rows; ``out`` is ``[N, heads * head_dim]``."""
        s = self._shape
        q = qkv[:, : s.num_heads * s.head_dim].view(
            -1, s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim
        )
        cuts = _row_by_row(items) if self._deterministic else _by_length(items)
        for rows, slots, positions, num_keys in cuts:
            num = rows.shape[0]
            result = self._attend_block(layer, q, rows, slots, positions, num_keys)
            valid = self._index((rows >= 0).ravel().nonzero()[0])
            target = self._index(rows[rows >= 0])
            flat = result.transpose(1, 2).reshape(num * rows.shape[1], -1)
            out.index_copy_(0, target, flat.index_select(0, valid))

    def _attend_block(
        self,
        layer: int,
        q: torch.Tensor,
        rows: np.ndarray[tuple[int, int], np.dtype[np.int64]],
        slots: np.ndarray[tuple[int], np.dtype[np.int64]],
        positions: np.ndarray[tuple[int], np.dtype[np.int64]],
        num_keys: int,
    ) -> torch.Tensor:
        """Attend ``[S, Q]`` rows (-1: padding) in one batch.

        Returns:
            ``[S, kv_heads, Q, group * head_dim]``.
        """
        s, (num, width) = self._shape, rows.shape
        queries = q[self._index(rows.clip(min=0).ravel())]  # [S*Q, hk, g, dh]
        group = queries.shape[2]
        queries = queries.view(num, width, s.num_kv_heads, group, s.head_dim)
        queries = queries.transpose(1, 2).reshape(num, s.num_kv_heads, width * group, s.head_dim)
        keys, values = (self._gather(c[layer], slots, num_keys) for c in (self._keys, self._values))
        result: torch.Tensor
        seen = self._index(positions)[:, None] + torch.arange(width, device=self._device)
        mask = torch.arange(num_keys, device=self._device) <= seen[..., None]  # [S, Q, keys]
        mask = mask.repeat_interleave(group, dim=1).unsqueeze(1)
        if self._deterministic:
            scores = (queries @ keys.transpose(-1, -2)).float() * s.head_dim**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            result = weights.to(values.dtype) @ values
        else:
            result = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        # some kernels of CUDA give their rows before their heads, which no view can be made of
        return result.reshape(num, s.num_kv_heads, width, group * s.head_dim)

    def _gather(
        self,
        cache: torch.Tensor,
        slots: np.ndarray[tuple[int], np.dtype[np.int64]],
        num_keys: int,
    ) -> torch.Tensor:
        """``[S, kv_heads, keys, head_dim]``; a view when the slots follow one another."""
        first = int(slots[0])
        if not self._deterministic and np.array_equal(slots, np.arange(first, first + len(slots))):
            return cache[first : first + len(slots), :, :num_keys]
        return cache[:, :, :num_keys].index_select(0, self._index(slots))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out = silu(gate) * up``; ``[N, 2 F]`` to ``[N, F]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=out)

    def clear(self, slot: int) -> None:
        """Wipe a slot: masked values are multiplied by 0, which does not remove NaN."""
        self._keys[:, slot] = 0
        self._values[:, slot] = 0

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of a slot, in all layers."""
        for cache in (self._keys, self._values):
            cache[:, target, :, :num_tokens] = cache[:, source, :, :num_tokens]


Cut = tuple[
    np.ndarray[tuple[int, int], np.dtype[np.int64]],
    np.ndarray[tuple[int], np.dtype[np.int64]],
    np.ndarray[tuple[int], np.dtype[np.int64]],
    int,
]
"""Rows ``[S, Q]`` with -1 as padding, slots ``[S]``, first positions ``[S]``, number of keys."""


def _by_length(items: Items) -> Iterator[Cut]:
    """Group items of like length, so that padding at most doubles a block."""
    size = np.ceil(np.log2(items.rows)).astype(np.int64)
    for exponent in np.unique(size):
        chosen = np.flatnonzero(size == exponent)
        chosen = chosen[np.argsort(items.slots[chosen], kind="stable")]
        rows = items.rows[chosen]
        offset = np.arange(rows.max())
        index = np.where(offset < rows[:, None], items.first[chosen][:, None] + offset, -1)
        positions = items.positions[chosen]
        yield index, items.slots[chosen], positions, _bucket(int((positions + rows).max()))


def _row_by_row(items: Items) -> Iterator[Cut]:
    """Every row alone, in blocks of FIXED_ROWS rows of one key bucket."""
    total = int(items.rows.sum())
    start = np.repeat(np.cumsum(items.rows) - items.rows, items.rows)
    offset = np.arange(total) - start
    row = np.repeat(items.first, items.rows) + offset
    position = np.repeat(items.positions, items.rows) + offset
    slot = np.repeat(items.slots, items.rows)
    buckets = position // KEY_BUCKET
    for bucket in np.unique(buckets):
        chosen = np.flatnonzero(buckets == bucket)
        for begin in range(0, len(chosen), FIXED_ROWS):
            block = chosen[begin : begin + FIXED_ROWS]
            pad = FIXED_ROWS - len(block)
            rows = np.pad(row[block], (0, pad), constant_values=-1)[:, None]
            slots, positions = (np.pad(a[block], (0, pad), mode="edge") for a in (slot, position))
            yield rows, slots, positions, (int(bucket) + 1) * KEY_BUCKET


def _bucket(length: int) -> int:
    return -(-length // KEY_BUCKET) * KEY_BUCKET


def fits(shape: Architecture) -> bool:
    """True when the kernels can run this shape."""
    return shape.head_dim % KEY_BLOCK == 0 and shape.ffn_width % KEY_BLOCK == 0


class NativeOps:
    """Normalisation, rotation, cache and attention of one decoder."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        shape: Architecture,
        rope: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
        max_tokens: int,
    ) -> None:
        self._k, self._shape = kernels, shape
        self._cos, self._sin = (table.contiguous() for table in rope)
        self._span = -(-max_tokens // KEY_BLOCK) * KEY_BLOCK
        size = (shape.num_layers, num_slots, shape.num_kv_heads, self._span * shape.head_dim)
        # numpy's zeros are pages the system hands out when they are first written
        self._keys = [torch.from_numpy(layer) for layer in np.zeros(size, np.float32)]
        self._values = [torch.from_numpy(layer) for layer in np.zeros(size, np.float32)]

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``x += residual``, then ``out = rms_norm(x) * weight``; ``[N, D]``."""
        self._k.rollart_add_rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            self._shape.norm_eps,
        )

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        layout: Layout,
    ) -> None:
        """Normalise and rotate q and k of ``[N, qkv_width]`` in place; put k and v in the cache."""
        s = self._shape
        q_norm, k_norm = (None if w is None else w.data_ptr() for w in norms)
        self._k.rollart_rotate_and_store(
            qkv.data_ptr(),
            q_norm,
            k_norm,
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            layout.slots.ctypes.data,
            layout.positions.ctypes.data,
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            qkv.shape[0],
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            self._span,
            s.norm_eps,
        )

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor, items: Items) -> None:
        """Attention of all items' rows; ``out`` is ``[N, heads * head_dim]``."""
        s = self._shape
        self._k.rollart_attention(
            qkv.data_ptr(),
            out.data_ptr(),
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            items.first.ctypes.data,
            items.rows.ctypes.data,
            items.slots.ctypes.data,
            items.positions.ctypes.data,
            len(items.first),
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            self._span,
            s.head_dim**-0.5,
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out = silu(gate) * up``; ``[N, 2 F]`` to ``[N, F]``."""
        self._k.rollart_silu_mul(gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1])

    def clear(self, slot: int) -> None:
        """Do nothing: masked values are never multiplied, not even by 0."""

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of a slot, in all layers."""
        s = self._shape
        for keys, values in zip(self._keys, self._values, strict=True):
            self._k.rollart_copy_slot(
                keys.data_ptr(),
                values.data_ptr(),
                source,
                target,
                num_tokens,
                s.num_kv_heads,
                s.head_dim,
                self._span,
            )
