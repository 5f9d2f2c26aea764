"""Forward passes of the trainer: compute logprobs of token rows, optimized for some models.

Takes: nothing. Gives: the spec of forward passes. Never: imports torch.

The class that a spec names derives from :class:`rollart_core.training.policy.Policy`. The trainer
uses the first class whose ``fits`` accepts the model. Classes of other distributions come before
RollArt's. If none fits, the trainer uses a built-in one, which runs any causal LM of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPassSpec(PluginSpec):
    """The spec of a forward pass."""
