"""A forward pass for the Llama family that computes every distinct prefix of a microbatch once.

:class:`TreeDecoder` reads the parameters of a transformers model (Llama, Mistral, Qwen2, Qwen3 and
what equals them) and computes what that model computes, with less work:

* every distinct prefix of the microbatch once (:mod:`rollart_cpu.training.tree`);
* in the last layer only the queries whose next token is a loss token;
* attention by plain matrix products over causal blocks (:mod:`rollart_cpu.training.kernels`).

Takes: samples. Gives: what :class:`~rollart_core.training.policy.Policy` gives, for one rank in
float32 that keeps its activations. Never: updates anything, or holds its own parameters.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rollart_core.training.batch import level, model_input
from rollart_core.training.head import Targets
from rollart_core.training.policy import ForwardSettings, Policy, Read, index_tensors, loss_tokens
from rollart_core.types import IntArray, Sample
from rollart_cpu.inference.kernels import load_library
from rollart_cpu.training import kernels, tree
from rollart_cpu.training.kernels import AttentionItems, AttentionPlan, TorchOps

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
    """Return the functions in C; None if they cannot be compiled.

    Args:
        required: Whether to raise instead.

    Raises:
        UserError: If ``required`` and there is no compiler, or it fails.
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


FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""``model_type`` of the models this forward equals."""


class TreePolicy(Policy):
    """A policy that computes every distinct prefix once."""

    def __init__(self, model: nn.Module, settings: ForwardSettings) -> None:
        super().__init__(model, settings)
        device = next(model.parameters()).device
        self._decoder = TreeDecoder(model, _ops(device, settings.kernels))

    @classmethod
    def fits(cls, model: nn.Module, settings: ForwardSettings) -> bool:
        """See :meth:`Policy.fits`."""
        is_plain = settings.world_size == 1 and not (settings.autocast or settings.recompute)
        return is_plain and supports(model)

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Count distinct prefixes only; see :class:`Policy`."""
        return level(tree.pack_shared([model_input(s) for s in samples], budget), num_ranks)

    def read(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> Read:
        """See :meth:`Policy.read`."""
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, targets, pairs = loss_pairs(prefixes, *loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        at, tokens, expand = index_tensors(states.device, rows, targets, pairs)
        scores = self.score(states, Targets(at, tokens), entropy_gradient=entropy_gradient)
        return Read(*scores, at, expand, states if hidden else None)

    def states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Policy.states`."""
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, _, pairs = loss_pairs(prefixes, *loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        at, expand = index_tensors(states.device, rows, pairs)
        return states[at][expand], None


def _ops(device: torch.device, kernels: str) -> TorchOps:
    """Return the functions in C if config and device allow it, else those of torch."""
    if kernels == "torch" or device.type != "cpu":
        return TorchOps()
    return native_ops(required=kernels == "native") or TorchOps()


def supports(model: nn.Module) -> bool:
    """Return whether :class:`TreeDecoder` computes what ``model`` computes."""
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FAMILY
        and layer_types == {"full_attention"}
        and not (config.model_type == "mistral" and config.sliding_window)
        and config.hidden_act == "silu"
    )


class TreeDecoder:
    """The training forward of one transformers model.

    Args:
        model: A causal LM for which :func:`supports` is True.
        ops: The functions between its matrix products.
    """

    def __init__(self, model: nn.Module, ops: TorchOps) -> None:
        self._ops = ops
        self._head: Any = model.lm_head
        self._body: Any = model.model

    def logits(self, prefixes: tree.PrefixTree, wanted: tree.Index) -> Tensor:
        """Return the logits ``[W, V]`` that follow the ``wanted`` nodes ``[W]``."""
        return self.head(self.hidden(prefixes, wanted))

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[W, V]`` of hidden states ``[W, H]``."""
        return self._head(hidden)  # type: ignore[no-any-return]

    def hidden(self, prefixes: tree.PrefixTree, wanted: tree.Index) -> Tensor:
        """Return the last hidden states ``[W, H]`` of the ``wanted`` nodes ``[W]``."""
        device = self._body.embed_tokens.weight.device
        rows = torch.from_numpy(wanted).to(device)
        full = device_plan(tree.full_plan(prefixes), prefixes.num_nodes, device)
        last = device_plan(_renumbered(prefixes, wanted), len(wanted), device)
        x = self._body.embed_tokens(torch.from_numpy(prefixes.token_ids).to(device))
        rope = self._rope(x, torch.from_numpy(prefixes.positions).to(device))
        *layers, final = self._body.layers
        for layer in layers:
            x = self._layer(layer, x, rope, full)
        x = self._layer(final, x, rope, last, rows)
        return self._norm(self._body.norm, x)

    def _rope(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, ``[U, D / 2]`` (both halves of the model's are equal)."""
        cos, sin = self._body.rotary_emb(x, positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _layer(
        self,
        layer: Any,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one decoder layer; with ``rows``, only those rows query and are returned."""
        attn, mlp = layer.self_attn, layer.mlp
        h = self._norm(layer.input_layernorm, x)
        k = self._turned(attn, "k", h, rope)
        v = attn.v_proj(h).unflatten(-1, (-1, attn.head_dim))
        if rows is not None:
            x, h, rope = x[rows], h[rows], (rope[0][rows], rope[1][rows])
        q = self._turned(attn, "q", h, (rope[0] * attn.scaling, rope[1] * attn.scaling))
        x = x + attn.o_proj(kernels.planned_attention(q, k, v, plan).flatten(1))
        h = self._norm(layer.post_attention_layernorm, x)
        return x + mlp.down_proj(self._ops.swiglu(mlp.gate_proj(h), mlp.up_proj(h)))  # type: ignore[no-any-return]

    def _turned(self, attn: Any, which: str, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Project to rotated queries or keys ``[N, heads, D]``, normalised where the model does."""
        heads: Tensor = getattr(attn, f"{which}_proj")(h).unflatten(-1, (-1, attn.head_dim))
        norm = getattr(attn, f"{which}_norm", None)
        if norm is None:
            return self._ops.turn_heads(heads, None, 0.0, rope)
        return self._ops.turn_heads(heads, norm.weight, norm.variance_epsilon, rope)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, norm.weight, norm.variance_epsilon)


def device_plan(
    buckets: Sequence[tree.Bucket], num_queries: int, device: torch.device
) -> AttentionPlan:
    """Return the buckets as an attention plan; every query ``0 .. num_queries - 1`` is in them."""
    slots = np.empty(num_queries, dtype=np.int64)
    flat = np.concatenate([b.queries.reshape(-1) for b in buckets])
    is_real = flat >= 0
    slots[flat[is_real]] = np.flatnonzero(is_real)
    items = tuple(_items(b, device) for b in buckets)
    return AttentionPlan(items, torch.from_numpy(slots).to(device))


def loss_pairs(
    prefixes: tree.PrefixTree, positions: Sequence[tree.Index], targets: Sequence[IntArray]
) -> tuple[tree.Index, tree.Index, tree.Index, tree.Index]:
    """Return the distinct predictions: tokens and their nodes.

    Args:
        prefixes: The tree.
        positions: For each row the positions of its loss tokens.
        targets: The tokens there.

    Returns:
        Wanted nodes ``[W]``; for each distinct (node, target) pair ``[P]`` its row in the wanted
        nodes, and its target; and for each loss token, in row order, its pair ``[K]``.
    """
    nodes = np.concatenate([p[at - 1] for p, at in zip(prefixes.paths, positions, strict=True)])
    wanted, rows = np.unique(nodes, return_inverse=True)
    tokens = np.concatenate(targets).astype(np.int64)
    pairs, inverse = np.unique(np.stack([rows, tokens]), axis=1, return_inverse=True)
    return wanted, pairs[0], pairs[1], inverse.reshape(-1)


def _renumbered(prefixes: tree.PrefixTree, wanted: tree.Index) -> list[tree.Bucket]:
    """Return the subset plan with queries counted among ``wanted`` instead of all nodes."""
    number = np.full(prefixes.num_nodes + 1, -1, dtype=np.int64)
    number[wanted] = np.arange(len(wanted))
    return [
        tree.Bucket(number[b.queries], b.keys, b.masked) for b in tree.subset_plan(prefixes, wanted)
    ]


def _items(bucket: tree.Bucket, device: torch.device) -> AttentionItems:
    mask = torch.zeros(bucket.masked.shape, dtype=torch.float32)
    mask.masked_fill_(torch.from_numpy(bucket.masked), float("-inf"))
    return AttentionItems(
        torch.from_numpy(np.maximum(bucket.queries, 0).reshape(-1)).to(device),
        torch.from_numpy(bucket.keys.reshape(-1)).to(device),
        mask[:, None, :, None, :].to(device),
        len(bucket.queries),
    )
