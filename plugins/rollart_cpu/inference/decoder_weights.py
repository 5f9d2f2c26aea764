"""The weights of our decoder, fused and laid out for fast products.

Takes: tensors by Hugging Face name. Gives: fused matrices ``[in, out]`` that ``load`` overwrites in
place. Never: computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from rollart_cpu.inference.architecture import Architecture


@dataclass(slots=True)
class Linear:
    """``x @ weight + bias``."""

    weight: torch.Tensor
    """``[in, out]``: on a CPU this layout multiplies up to twice as fast as its transpose."""
    bias: torch.Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer."""

    norm1: torch.Tensor
    norm2: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class DecoderWeights:
    """All weights, and where in them each named tensor goes."""

    def __init__(
        self,
        shape: Architecture,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        biased: frozenset[str] = frozenset(),
    ) -> None:
        """Allocate.

        Args:
            shape: The architecture.
            dtype: The dtype that weights are rounded to.
            compute_dtype: The dtype of storage and products.
            device: The torch device.
            biased: Names of all bias tensors the model has.
        """
        self.shape, self._dtype, self._compute_dtype = shape, dtype, compute_dtype
        self._device, self._biased = device, biased
        self._put: dict[str, Callable[[torch.Tensor], object]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self.embedding = self._vector("model.embed_tokens.weight", shape.vocab_size, shape.width)
        self.norm = self._vector("model.norm.weight", shape.width)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(shape.num_layers)]
        self.head = self._head()
        linears = [m for w in self.layers for m in (w.qkv, w.out, w.gate_up, w.down)]
        self.num_products = sum(m.weight.numel() for m in [*linears, self.head])
        """Multiplications per row."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Overwrite all weights; see :meth:`rollart_cpu.inference.runner.Runner.load`."""
        new = {name: tensor for name, tensor in tensors if not self._is_implied(name)}
        self._check(new)  # check all first: refused weights leave the old ones intact
        for name, tensor in new.items():
            self._put[name](tensor.to(self._dtype))
        self._tie()
        return sum(tensor.numel() * tensor.element_size() for tensor in new.values())

    def alike(self) -> DecoderWeights:
        """Return another, uninitialised set of the same form."""
        return DecoderWeights(
            self.shape, self._dtype, self._compute_dtype, self._device, self._biased
        )

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Overwrite all weights tensor by tensor and return their bytes.

        Only for a set that is not in use: refused weights leave it partly written.

        Raises:
            ValueError: If a tensor is unknown, missing, or of another shape.
        """
        missing, num_bytes = set(self._put), 0
        for name, tensor in tensors:
            if self._is_implied(name):
                continue
            self._check_one(name, tensor)
            self._put[name](tensor.to(self._dtype))
            missing.discard(name)
            num_bytes += tensor.nbytes
        self._check_all(missing)
        self._tie()
        return num_bytes

    def _tie(self) -> None:
        if self.shape.tied and self.head.weight.data_ptr() != self.embedding.data_ptr():
            self.head.weight.copy_(self.embedding.t())

    def _is_implied(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.shape.tied
        )

    def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._check_one(name, tensor)
        self._check_all(self._put.keys() - tensors.keys())

    def _check_one(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._put:
            raise ValueError(f"weights hold {name!r}, which this model has not")
        if tuple(tensor.shape) != self._sizes[name]:
            want = self._sizes[name]
            raise ValueError(f"{name!r} is {tuple(tensor.shape)}, the model wants {want}")

    def _check_all(self, missing: AbstractSet[str]) -> None:
        if missing:
            raise ValueError(f"weights lack {len(missing)} tensors, such as {min(missing)!r}")

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=self._compute_dtype, device=self._device)

    def _vector(self, name: str, *size: int) -> torch.Tensor:
        tensor = self._empty(*size)
        self._register(name, size, tensor.copy_)
        return tensor

    def _register(
        self, name: str, size: tuple[int, ...], put: Callable[[torch.Tensor], object]
    ) -> None:
        self._put[name], self._sizes[name] = put, size

    def _linear(self, prefix: str, parts: dict[str, int], num_in: int) -> Linear:
        """Make one matrix of several named ones, side by side."""
        weight = self._empty(num_in, sum(parts.values()))
        has_bias = any(f"{prefix}{part}.bias" in self._biased for part in parts)
        bias = self._empty(sum(parts.values())).zero_() if has_bias else None
        start = 0
        for part, size in parts.items():
            view = weight[:, start : start + size].t()
            self._register(f"{prefix}{part}.weight", (size, num_in), view.copy_)
            if bias is not None and f"{prefix}{part}.bias" in self._biased:
                self._register(f"{prefix}{part}.bias", (size,), bias[start : start + size].copy_)
            start += size
        return Linear(weight, bias)

    def _layer(self, prefix: str) -> LayerWeights:
        s = self.shape
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        norm = self._vector
        return LayerWeights(
            norm1=norm(prefix + "input_layernorm.weight", s.width),
            norm2=norm(prefix + "post_attention_layernorm.weight", s.width),
            q_norm=norm(attention + "q_norm.weight", s.head_dim) if s.qk_norm else None,
            k_norm=norm(attention + "k_norm.weight", s.head_dim) if s.qk_norm else None,
            qkv=self._linear(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, s.width),
            out=self._linear(attention, {"o_proj": s.width}, q),
            gate_up=self._linear(mlp, {"gate_proj": s.ffn_width, "up_proj": s.ffn_width}, s.width),
            down=self._linear(mlp, {"down_proj": s.width}, s.ffn_width),
        )

    def _head(self) -> Linear:
        s = self.shape
        if not s.tied:
            return self._linear("", {"lm_head": s.vocab_size}, s.width)
        if self._device.type != "cpu":
            return Linear(self.embedding.t())
        return Linear(self._empty(s.width, s.vocab_size))
