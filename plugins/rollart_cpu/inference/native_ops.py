"""What lies between a decoder's matrix products, in the compiled float32 kernels.

Takes: contiguous float32 tensors on the CPU. Gives: results in place or in given buffers. Never:
lets a row's result depend on the rows beside it.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from rollart_cpu.inference.architecture import Architecture
from rollart_cpu.inference.layout import Items, Layout

KEY_BLOCK = 16


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
        """Nothing to do: what a row must not see is never multiplied, not even by 0."""

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
