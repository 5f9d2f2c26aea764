"""From token rows to the logprobs of their loss tokens, by one of three roads.

======== ===================================================== =================================
road     for                                                   work
======== ===================================================== =================================
tree     Llama family, one rank, float32, activations kept     every distinct prefix once
packed   models that take a custom attention function          no padding
padded   any causal LM of transformers                         rows padded to the longest
======== ===================================================== =================================

Takes: samples. Gives: logprobs and entropies ``[K]`` of their loss tokens, in row order, float32;
and, where asked for, the last hidden states ``[K, H]`` from before them. Never: updates anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rollart_core.training import packed
from rollart_core.training.batch import balance, level, model_input, pack
from rollart_core.types import IntArray, Sample
from rollart_cpu.training import decoder, kernels, tree

Road = Literal["tree", "packed", "padded"]


class Read(NamedTuple):
    """What a model made of some rows; ``R`` places after which a loss token stands."""

    logits: Tensor
    """``[R, V]``."""
    rows: Tensor
    """``[P]``: the place of each (place, target) pair."""
    targets: Tensor
    """``[P]``."""
    pairs: Tensor
    """``[K]``: the pair of each loss token."""
    hidden: Tensor | None = None
    """``[R, H]``: what the logits were made from; None where nobody asked."""


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

    @property
    def hidden_size(self) -> int:
        """Width of the last hidden states."""
        config: Any = self.model.config
        return int(config.hidden_size)

    @abstractmethod
    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Return bins of indices of at most ``budget`` computed tokens (a longer row: alone).

        For several ranks equally many each, where there are enough samples, and of like cost.
        """

    @abstractmethod
    def _read(self, samples: Sequence[Sample], *, hidden: bool = False) -> Read:
        """Return the logits that precede loss tokens, with the hidden states where asked for."""

    def logprobs(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies (without gradient) of all loss tokens, ``[K]`` each."""
        logprobs, entropy, _ = self.outputs(samples)
        return logprobs, entropy

    def outputs(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what :meth:`logprobs` does, and the last hidden states ``[K, H]`` if asked for.

        Those are from before the loss tokens, float32, with gradient. So is the entropy, with
        ``entropy_gradient``.
        """
        with self._context():
            read = self._read(samples, hidden=hidden)
        logits = read.logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs, entropy = kernels.logprobs(
            logits, read.rows, read.targets, entropy_gradient=entropy_gradient
        )
        states = None if read.hidden is None else read.hidden.float()[read.rows][read.pairs]
        return logprobs[read.pairs], entropy[read.rows][read.pairs], states

    def hidden(self, samples: Sequence[Sample]) -> Tensor:
        """Return the last hidden states ``[K, H]`` alone, with hardly any logits."""
        with self._context():
            states, output = self._states(samples)
        if output is None:
            return states.float()
        # FSDP2 hooks the backward pass at the model's output: it must be part of the graph.
        return states.float() + 0.0 * output.float().sum()

    def _states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        """Return hidden states ``[K, H]``, and a part of what the model itself gave, if asked."""
        read = self._read(samples, hidden=True)
        assert read.hidden is not None
        return read.hidden[read.rows][read.pairs], read.logits[:1]

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

    def _read(self, samples: Sequence[Sample], *, hidden: bool = False) -> Read:
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, targets, pairs = decoder.loss_pairs(prefixes, *_loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        logits = self._decoder.head(states)
        at, tokens, expand = _tensors(logits.device, rows, targets, pairs)
        return Read(logits, at, tokens, expand, states if hidden else None)

    def _states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, _, pairs = decoder.loss_pairs(prefixes, *_loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        at, expand = _tensors(states.device, rows, pairs)
        return states[at][expand], None


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

    def _read(self, samples: Sequence[Sample], *, hidden: bool = False) -> Read:
        inputs, keep, tokens = self._placed(samples)
        with _last_hidden(self.model, wanted=hidden) as seen:
            logits = packed.forward(self.model, inputs, keep)
        each = torch.arange(len(tokens), device=tokens.device)
        return Read(logits, each, tokens, each, seen[0][0, keep] if hidden else None)

    def _states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        inputs, keep, _ = self._placed(samples)
        with _last_hidden(self.model, wanted=True) as seen:
            logits = packed.forward(self.model, inputs, keep[:1])
        return seen[0][0, keep], logits

    def _placed(self, samples: Sequence[Sample]) -> tuple[list[IntArray], Tensor, Tensor]:
        """Return the rows, and where each loss token's predecessor stands, and the token, [K]."""
        inputs = [model_input(s) for s in samples]
        self.computed_tokens += sum(len(row) for row in inputs)
        positions, targets = _loss_tokens(samples)
        starts = np.cumsum([0, *(len(row) for row in inputs)])
        at = np.concatenate([s + p - 1 for s, p in zip(starts[:-1], positions, strict=True)])
        device = next(self.model.parameters()).device
        keep, tokens = _tensors(device, at, np.concatenate(targets))
        return inputs, keep, tokens


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

    def _read(self, samples: Sequence[Sample], *, hidden: bool = False) -> Read:
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
        with _last_hidden(self.model, wanted=hidden) as seen:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        each = torch.arange(len(tokens), device=device)
        states = seen[0].flatten(0, 1)[keep] if hidden else None
        return Read(out.logits.flatten(0, 1)[keep], each, tokens, each, states)


def choose_attention(
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


@contextmanager
def _last_hidden(model: nn.Module, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect what the decoder of a transformers model hands to its head, ``[B, T, H]``."""
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    hook = decoder.register_forward_hook(lambda module, given, said: seen.append(said[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _loss_tokens(samples: Sequence[Sample]) -> tuple[list[tree.Index], list[IntArray]]:
    """Return for each sample the positions of its loss tokens, and the tokens there."""
    positions = [np.flatnonzero(s.loss_mask).astype(np.int64) for s in samples]
    targets = [s.token_ids[at] for s, at in zip(samples, positions, strict=True)]
    return positions, targets


def _tensors(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
