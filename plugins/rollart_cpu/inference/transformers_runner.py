"""Runs any causal LM that transformers can load: slower than our decoder, but of every kind.

Takes: a model folder. Gives: a :class:`Runner` that keeps one transformers cache a slot. Never:
batches segments; correctness comes first here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rollart_core.errors import ConfigError
from rollart_cpu.inference.runner import Runner, TokenBatch


class HuggingFaceRunner(Runner):
    """One forward per segment through ``AutoModelForCausalLM``."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        max_tokens: int,
        max_batch_tokens: int,
    ) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except Exception as e:
            raise ConfigError(f"transformers cannot load {str(folder)!r}: {e}") from e
        self._model = model.to(device).eval()
        self._device = device
        self._cache_name = cache_name(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.max_batch_tokens = max_batch_tokens
        self._caches: list[Any] = [None] * num_slots
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._staged: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """See :meth:`Runner.forward`."""
        wanted, rows, first = set(batch.wanted.tolist()), [], 0
        for i, length in enumerate(batch.lengths.tolist()):
            ids = batch.token_ids[first : first + length].tolist()
            keep = length if batch.every_row else 1
            logits = self._segment(int(batch.slots[i]), int(batch.starts[i]), ids, keep)
            if batch.every_row or i in wanted:
                rows.append(logits)
            first += length
        return torch.cat(rows) if rows else torch.empty(0, self.vocab_size, device=self._device)

    def _segment(self, slot: int, start: int, ids: list[int], keep: int = 1) -> torch.Tensor:
        """Run one segment on a slot's cache and return its last rows' logits ``[keep, vocab]``."""
        kept = self._tokens[slot]
        if len(kept) != start and not self._crop(slot, start):
            ids = kept[:start] + ids  # a cache that cannot be cut is computed again
            self._caches[slot], start = None, 0
        result = self._model(
            torch.tensor([ids], device=self._device),
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self._caches[slot]},
        )
        self._caches[slot] = getattr(result, self._cache_name)
        self._tokens[slot] = kept[:start] + ids
        logits: torch.Tensor = result.logits[0, -keep:].float()
        return logits

    def _crop(self, slot: int, length: int) -> bool:
        """Cut a slot's cache to ``length`` tokens; False when its kind cannot be cut."""
        if length == 0:
            self._caches[slot], self._tokens[slot] = None, []
            return True
        cache = self._caches[slot]
        if not hasattr(cache, "crop") or any(getattr(cache, "is_sliding", [True])):
            return False
        cache.crop(length - len(self._tokens[slot]))  # negative: how many to take off
        return True

    def clear(self, slot: int) -> None:
        """See :meth:`Runner.clear`."""
        self._caches[slot], self._tokens[slot] = None, []

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """See :meth:`Runner.copy_prefix`."""
        self._caches[target] = copy.deepcopy(self._caches[source])
        self._tokens[target] = list(self._tokens[source])
        if len(self._tokens[target]) != num_tokens and not self._crop(target, num_tokens):
            ids = self._tokens[target][:num_tokens]
            self._caches[target], self._tokens[target] = None, []
            self._segment(target, 0, ids)
        self._tokens[target] = self._tokens[target][:num_tokens]

    @torch.inference_mode()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.load`."""
        num_bytes = self.stage(tensors)
        self.swap()
        return num_bytes

    @torch.inference_mode()
    def swap(self) -> None:
        """See :meth:`Runner.swap`; a copy within the device."""
        state = self._model.state_dict()
        for name, tensor in self._staged.items():
            state[name].copy_(tensor)

    @torch.inference_mode()
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.stage`."""
        state, self._staged = self._model.state_dict(), {}
        missing, num_bytes = {_place(t): name for name, t in state.items()}, 0
        for name, tensor in tensors:
            if name not in state:
                raise ValueError(f"weights hold {name!r}, which this model has not")
            if state[name].shape != tensor.shape:
                want = tuple(state[name].shape)
                raise ValueError(f"{name!r} is {tuple(tensor.shape)}, the model wants {want}")
            self._staged[name] = torch.empty_like(state[name]).copy_(tensor)
            missing.pop(_place(state[name]), None)
            num_bytes += tensor.nbytes
        buffers = {_place(b) for b in self._model.buffers()}
        lacking = [name for place, name in missing.items() if place not in buffers]
        if lacking:
            raise ValueError(f"weights lack {len(lacking)} tensors, such as {min(lacking)!r}")
        return num_bytes


def cache_name(model: torch.nn.Module) -> str:
    """Return what a model calls its cache: ``cache`` since transformers 5.24.

    Earlier versions, and models that bring their own code, say ``past_key_values``.
    """
    named = "cache" in inspect.signature(model.forward).parameters
    return "cache" if named else "past_key_values"


def _place(tensor: torch.Tensor) -> int:
    """Tied tensors lie at one place and count once."""
    return tensor.data_ptr()
