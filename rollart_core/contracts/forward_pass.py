"""Forward passes of the trainer: from token rows to logprobs, fast for some models.

Takes: nothing. Gives: the spec of forward passes. Never: imports torch.

The class that a spec names derives from :class:`rollart_core.training.policy.Policy`. The trainer
takes the first one whose ``fits`` accepts the model: those of other distributions come before
RollArt's. If none does, it takes one of its own, which run any causal LM of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPassSpec(PluginSpec):
    """What a forward pass says of itself."""
