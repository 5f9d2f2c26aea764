"""What a decoder needs between its matrix products.

Takes: packed rows and their layout. Gives: one protocol, kept by the compiled kernels and by plain
torch. Never: holds weights.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollart_cpu.inference.layout import Items, Layout


class Ops(Protocol):
    """See :class:`~rollart_cpu.inference.native_ops.NativeOps` and ``torch_ops.TorchOps``."""

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
