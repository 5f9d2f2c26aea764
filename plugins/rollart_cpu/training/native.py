"""The functions of :mod:`rollart_cpu.training.kernels` in C, for float32 on the CPU.

One pass over memory each, forward and backward, where torch takes several. Compiled once a machine,
where there is a C compiler (in well under a second; torch.compile would need longer than it saves
in a short run). Never: changes a result by more than rounding.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollart_cpu.inference.kernels import load_library
from rollart_cpu.training.kernels import TorchOps

_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[object, ...]] = {
    "swiglu": (_P, _P, _P, _I, _T),
    "swiglu_back": (*(_P,) * 5, _I, _T),
    "rms_norm": (*(_P,) * 4, _I, _I, _F, _T),
    "rms_norm_back": (*(_P,) * 6, _I, _I, _T),
    "turn_heads": (*(_P,) * 6, _I, _I, _I, _F, _T),
    "turn_heads_back": (*(_P,) * 8, _I, _I, _I, _T),
}


class NativeOps(TorchOps):
    """:class:`TorchOps` in C; float32 on the CPU only."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :meth:`TorchOps.rms_norm`."""
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :meth:`TorchOps.swiglu`."""
        return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]

    def turn_heads(
        self, x: Tensor, weight: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See :meth:`TorchOps.turn_heads`."""
        return _TurnHeads.apply(x, weight, eps, *rope)  # type: ignore[no-any-return,no-untyped-call]


def native_ops(required: bool = False) -> NativeOps | None:
    """Return the functions in C; None where they cannot be compiled.

    Args:
        required: Whether to raise instead.

    Raises:
        UserError: When ``required`` and there is no compiler, or it fails.
    """
    return None if _library(required) is None else NativeOps()


@functools.cache
def _library(required: bool = False) -> ctypes.CDLL | None:
    return load_library(Path(__file__).with_name("native.c"), SIGNATURES, required)


def _call(name: str, *arguments: Tensor | float | None) -> None:
    library = _library()
    assert library is not None
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    getattr(library, name)(*plain, torch.get_num_threads())


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, scale = torch.empty_like(x), x.new_empty(len(x))
        _call("rms_norm", x, weight, out, scale, *x.shape, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad_x, parts = torch.empty_like(x), _partial_sums(weight)
        _call("rms_norm_back", grad.contiguous(), x, weight, scale, grad_x, parts, *x.shape)
        return grad_x, parts.sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _call("swiglu", gate, up, out, gate.numel())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _call("swiglu_back", grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = x.contiguous()
        out, scale = torch.empty_like(x), x.new_empty(x.shape[:2])
        _call("turn_heads", x, weight, cos, sin, out, scale, *x.shape, eps)
        ctx.has_weight = weight is not None
        ctx.save_for_backward(x, x.new_empty(0) if weight is None else weight, cos, sin, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, cos, sin, scale = ctx.saved_tensors
        grad_x, parts = torch.empty_like(x), _partial_sums(x[0, 0])
        w = weight if ctx.has_weight else None
        _call("turn_heads_back", grad.contiguous(), x, w, cos, sin, scale, grad_x, parts, *x.shape)
        return grad_x, parts.sum(0) if ctx.has_weight else None, None, None, None


def _partial_sums(like: Tensor) -> Tensor:
    """Return zeros ``[threads, D]``: one sum a thread, over a fixed range of rows."""
    return like.new_zeros(torch.get_num_threads(), len(like))
