"""The few differentiable functions of the training forward, with backward passes by hand.

torch's eager autograd would save and re-read many more intermediate tensors; on a CPU a small
model is bound by that traffic as much as by its matrix products.

Takes and gives: torch tensors of one floating dtype, on any device. Never: holds parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_x = grad * weight
        dot = (grad_x * normed).mean(-1, keepdim=True)
        return grad_x.sub_(normed.mul_(dot)).mul_(scale), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class TorchOps:
    """The functions between the matrix products of a layer, in torch; for any device and dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``weight x / sqrt(mean(x^2) + eps)`` by row ``[N, D]`` (arXiv:1910.07467)."""
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return ``silu(gate) up`` (arXiv:2002.05202)."""
        return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]

    def turn_heads(
        self, x: Tensor, weight: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Normalise heads ``[N, H, D]`` where a weight is given, then rotate them.

        Args:
            x: Queries or keys.
            weight: ``[D]``, or None for models that do not normalise heads.
            eps: Of the norm.
            rope: cos and sin, ``[N, D / 2]`` each (arXiv:2104.09864), times any scale.
        """
        normed = x if weight is None else self.rms_norm(x, weight, eps)
        cos, sin = rope
        return _Rotary.apply(normed, cos[:, None], sin[:, None])  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, slots=True)
class AttentionItems:
    """A :class:`rollart_cpu.training.tree.Bucket` on the device."""

    queries: Tensor
    """``[n Q]`` rows of the query tensor, 0 where padded."""
    keys: Tensor
    """``[n K]`` rows of the key and value tensors."""
    mask: Tensor
    """``[n or 1, 1, Q, 1, M]``, 0 or -inf, added to the scores of the last ``M`` keys."""
    num_items: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which queries see which keys."""

    items: tuple[AttentionItems, ...]
    slots: Tensor
    """``[Nq]``; for each query row its slot among all items' query slots, in order."""


class _PlannedAttention(torch.autograd.Function):
    """Scores are never larger than one bucket, and padding is computed and thrown away."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        saved: list[Tensor] = []
        outs: list[Tensor] = []
        for items in plan.items:
            q_i, k_i, v_i = _gather(q, k, v, items)
            probs = torch.softmax(_scores(q_i, k_i, items, q.shape[1]), dim=-1)
            outs.append(_merge(torch.bmm(probs, v_i), items, q.shape))
            saved += [q_i, k_i, v_i, probs]
        ctx.plan, ctx.shapes = plan, (q.shape, k.shape)
        ctx.save_for_backward(*saved)
        return torch.cat(outs)[plan.slots]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (q_shape, k_shape), plan = ctx.shapes, ctx.plan
        num_slots = sum(len(i.queries) for i in plan.items)
        padded = grad.new_zeros(num_slots, *q_shape[1:])
        padded[plan.slots] = grad
        grad_k, grad_v = grad.new_zeros(k_shape), grad.new_zeros(k_shape)
        grads_q: list[Tensor] = []
        start = 0
        for n, items in enumerate(plan.items):
            q_i, k_i, v_i, probs = ctx.saved_tensors[4 * n : 4 * n + 4]
            out = _split(padded[start : start + len(items.queries)], items, k_shape[1])
            start += len(items.queries)
            grad_probs = torch.bmm(out, v_i.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            grads_q.append(_merge(torch.bmm(grad_scores, k_i), items, q_shape))
            grad_v.index_add_(0, items.keys, _unkey(torch.bmm(probs.transpose(1, 2), out), k_shape))
            grad_k.index_add_(
                0, items.keys, _unkey(torch.bmm(grad_scores.transpose(1, 2), q_i), k_shape)
            )
        return torch.cat(grads_q)[plan.slots], grad_k, grad_v, None


def planned_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention outputs ``[Nq, H, D]``.

    Args:
        q: ``[Nq, H, D]``, already scaled.
        k: ``[Nk, KVH, D]``; each KV head serves ``H / KVH`` query heads in a row.
        v: ``[Nk, KVH, D]``.
        plan: Which queries see which keys; each query row is in it exactly once.
    """
    return _PlannedAttention.apply(q, k, v, plan)  # type: ignore[no-any-return,no-untyped-call]


def _gather(q: Tensor, k: Tensor, v: Tensor, items: AttentionItems) -> tuple[Tensor, ...]:
    return (
        _split(q[items.queries], items, k.shape[1]),
        _keyed(k[items.keys], items),
        _keyed(v[items.keys], items),
    )


def _split(rows: Tensor, items: AttentionItems, num_kv_heads: int) -> Tensor:
    """``[n Q, H, D]`` -> ``[n KVH, Q G, D]``: the heads that share keys become further queries."""
    _, num_heads, dim = rows.shape
    n, group = items.num_items, num_heads // num_kv_heads
    rows = rows.view(n, -1, num_kv_heads, group, dim).transpose(1, 2)
    return rows.reshape(n * num_kv_heads, -1, dim)


def _merge(rows: Tensor, items: AttentionItems, shape: torch.Size) -> Tensor:
    """``[n KVH, Q G, D]`` -> ``[n Q, H, D]``."""
    _, num_heads, dim = shape
    n = items.num_items
    num_kv_heads = len(rows) // n
    rows = rows.view(n, num_kv_heads, -1, num_heads // num_kv_heads, dim).transpose(1, 2)
    return rows.reshape(-1, num_heads, dim)


def _keyed(rows: Tensor, items: AttentionItems) -> Tensor:
    """``[n K, KVH, D]`` -> ``[n KVH, K, D]``."""
    _, num_kv_heads, dim = rows.shape
    n = items.num_items
    return rows.view(n, -1, num_kv_heads, dim).transpose(1, 2).reshape(n * num_kv_heads, -1, dim)


def _unkey(rows: Tensor, shape: torch.Size) -> Tensor:
    """``[n KVH, K, D]`` -> ``[n K, KVH, D]``."""
    _, num_kv_heads, dim = shape
    rows = rows.view(-1, num_kv_heads, rows.shape[1], dim).transpose(1, 2)
    return rows.reshape(-1, num_kv_heads, dim)


def _scores(q: Tensor, k: Tensor, items: AttentionItems, num_heads: int) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2))
    num_kv_heads = len(q) // items.num_items
    viewed = scores.view(items.num_items, num_kv_heads, -1, num_heads // num_kv_heads, k.shape[1])
    viewed[..., -items.mask.shape[-1] :].add_(items.mask)
    return scores
