"""Every distinct prefix of a microbatch once: a forward pass for the Llama family.

Takes: samples. Gives: what :class:`~rollart_core.training.policy.Policy` gives, for one rank in
float32 that keeps its activations. Never: updates anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollart_core.training.batch import level, model_input
from rollart_core.training.policy import ForwardSettings, Policy, Read, index_tensors, loss_tokens
from rollart_core.types import Sample
from rollart_cpu.training import decoder, tree
from rollart_cpu.training.kernels import TorchOps
from rollart_cpu.training.native import native_ops


class TreePolicy(Policy):
    """Every distinct prefix once."""

    def __init__(self, model: nn.Module, settings: ForwardSettings) -> None:
        super().__init__(model, settings)
        device = next(model.parameters()).device
        self._decoder = decoder.TreeDecoder(model, _ops(device, settings.kernels))

    @classmethod
    def fits(cls, model: nn.Module, settings: ForwardSettings) -> bool:
        """See :meth:`Policy.fits`."""
        is_plain = settings.world_size == 1 and not (settings.autocast or settings.recompute)
        return is_plain and decoder.supports(model)

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Count distinct prefixes only; see :class:`Policy`."""
        return level(tree.pack_shared([model_input(s) for s in samples], budget), num_ranks)

    def read(self, samples: Sequence[Sample], *, hidden: bool = False) -> Read:
        """See :meth:`Policy.read`."""
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, targets, pairs = decoder.loss_pairs(prefixes, *loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        logits = self._decoder.head(states)
        at, tokens, expand = index_tensors(logits.device, rows, targets, pairs)
        return Read(logits, at, tokens, expand, states if hidden else None)

    def states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Policy.states`."""
        prefixes = tree.build([model_input(s) for s in samples])
        self.computed_tokens += prefixes.num_nodes
        wanted, rows, _, pairs = decoder.loss_pairs(prefixes, *loss_tokens(samples))
        states = self._decoder.hidden(prefixes, wanted)
        at, expand = index_tensors(states.device, rows, pairs)
        return states[at][expand], None


def _ops(device: torch.device, kernels: str) -> TorchOps:
    """Return the functions in C where config and device allow it, else those of torch."""
    if kernels == "torch" or device.type != "cpu":
        return TorchOps()
    return native_ops(required=kernels == "native") or TorchOps()
