"""From token rows to the logprobs of their loss tokens, by one of three roads.

======== ===================================================== =================================
road     for                                                   work
======== ===================================================== =================================
tree     Llama family, one rank, float32, activations kept     every distinct prefix once
packed   models that take a custom attention function          no padding
padded   any causal LM of transformers                         rows padded to the longest
======== ===================================================== =================================

Takes: samples. Gives: logprobs and entropies ``[K]`` of their loss tokens, in row order, float32.
Never: updates anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollart_core.train import decoder, kernels, packed, tree
from rollart_core.train.batch import balance, level, model_input, pack
from rollart_core.types import IntArray, Sample

Road = Literal["tree", "packed", "padded"]


class Policy(ABC):
    """A model, and how its logprobs are computed.

    Args:
        model: A transformers causal LM.
        temperature: Logits are divided by it.
        autocast: Whether matrix products run in bfloat16.
    """

    def __init__(self, model: nn.Module, temperature: float, autocast: bool) -> None:
        self.model = model
        self.temperature = temperature
        self.computed_tokens = 0
        """Tokens that went through the model so far, after sharing and before padding."""
        self._autocast = autocast
        self._device_type = next(model.parameters()).device.type

    @abstractmethod
    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Return bins of indices of at most ``budget`` computed tokens (a longer row: alone).

        For several ranks equally many each, where there are enough samples, and of like cost.
        """

    @abstractmethod
    def _logits(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits ``[R, V]``, the (row, target) pairs, and each loss token's pair ``[K]``."""

    def logprobs(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies (without gradient) of all loss tokens, ``[K]`` each."""
        with self._context():
            logits, rows, targets, pairs = self._logits(samples)
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs, entropy = kernels.logprobs(logits, rows, targets)
        return logprobs[pairs], entropy[rows][pairs]

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Use another temperature for a while."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    def _context(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self._autocast)


class TreePolicy(Policy):
    """Every distinct prefix once."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        autocast: bool,
        ops: kernels.TorchOps | None = None,
    ) -> None:
        super().__init__(model, temperature, autocast)
        self._decoder = decoder.TreeDecoder(model, ops or kernels.TorchOps())

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Count distinct prefixes only; see :class:`Policy`."""
        return level(tree.pack_shared([model_input(s) for s in samples], budget), num_ranks)

    def _logits(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, targets, pairs = decoder.loss_pairs(prefixes, *_loss_tokens(samples))
        logits = self._decoder.logits(prefixes, wanted)
        at, tokens, expand = _tensors(logits.device, rows, targets, pairs)
        return logits, at, tokens, expand


class PackedPolicy(Policy):
    """Rows one after the other, without padding, in one row of the model's input."""

    def __init__(self, model: nn.Module, temperature: float, autocast: bool) -> None:
        super().__init__(model, temperature, autocast)
        packed.install(model)

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Count the tokens the model must read; see :class:`Policy`."""
        costs = [len(model_input(s)) for s in samples]
        return pack(costs, budget) if num_ranks == 1 else balance(costs, budget, num_ranks)

    def _logits(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = [model_input(s) for s in samples]
        self.computed_tokens += sum(len(row) for row in inputs)
        positions, targets = _loss_tokens(samples)
        starts = np.cumsum([0, *(len(row) for row in inputs)])
        at = np.concatenate([s + p - 1 for s, p in zip(starts[:-1], positions, strict=True)])
        device = next(self.model.parameters()).device
        keep, tokens = _tensors(device, at, np.concatenate(targets))
        logits = packed.forward(self.model, inputs, keep)
        each = torch.arange(len(tokens), device=device)
        return logits, each, tokens, each


class PaddedPolicy(Policy):
    """Rows padded on the right to the longest, with an attention mask."""

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Count padding too; see :class:`Policy`."""
        lengths = [len(model_input(s)) for s in samples]
        bins: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
                bins.append([])
            bins[-1].append(i)
        return level(bins, num_ranks)

    def _logits(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = [model_input(s) for s in samples]
        self.computed_tokens += sum(len(row) for row in inputs)
        positions, targets = _loss_tokens(samples)
        width = max(len(row) for row in inputs)
        ids, mask = np.zeros((2, len(inputs), width), dtype=np.int64)
        for n, row in enumerate(inputs):
            ids[n, : len(row)], mask[n, : len(row)] = row, 1
        at = np.concatenate([n * width + p - 1 for n, p in enumerate(positions)])
        device = next(self.model.parameters()).device
        input_ids, attention_mask, keep, tokens = _tensors(
            device, ids, mask, at, np.concatenate(targets)
        )
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        each = torch.arange(len(tokens), device=device)
        return out.logits.flatten(0, 1)[keep], each, tokens, each


def choose_road(
    model: nn.Module, *, world_size: int, autocast: bool, recompute: bool = False
) -> Road:
    """Return the best road for a model."""
    if world_size == 1 and not (autocast or recompute) and decoder.supports(model):
        return "tree"
    return "packed" if packed.supports(model) else "padded"


def make_policy(
    road: Road,
    model: nn.Module,
    temperature: float,
    *,
    autocast: bool,
    ops: kernels.TorchOps | None = None,
) -> Policy:
    """Return the policy of a road; ``ops`` are for the tree road (None: torch's)."""
    if road == "tree":
        return TreePolicy(model, temperature, autocast, ops)
    if road == "packed":
        return PackedPolicy(model, temperature, autocast)
    return PaddedPolicy(model, temperature, autocast)


def _loss_tokens(samples: Sequence[Sample]) -> tuple[list[tree.Index], list[IntArray]]:
    """Return for each sample the positions of its loss tokens, and the tokens there."""
    positions = [np.flatnonzero(s.loss_mask).astype(np.int64) for s in samples]
    targets = [s.token_ids[at] for s, at in zip(samples, positions, strict=True)]
    return positions, targets


def _tensors(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
