"""The policy that a KL penalty compares with: a second model, or the policy's own one.

Takes: the policy, and what of it is trained. Gives: the reference as a policy, and its tensors for
checkpoints. Never: is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rollart_core.config.training import Reference as ReferenceConfig
from rollart_core.training import checkpoint
from rollart_core.training.loading import check_vocabulary
from rollart_core.training.lora import LoRAWeights
from rollart_core.training.policy import Policy
from rollart_core.training.trained import TrainedWeights


class ReferencePolicy:
    """The weights as they are when it is first asked for, or the model that a config names.

    With LoRA the weights of then are the base with other adapters, and need no second model; no
    more does the base itself, where the config names it.

    Args:
        policy: The policy.
        weights: What of it is trained.
        load: From a model's path (None: the policy's own) to a policy.
        named: The ``reference`` section.
    """

    def __init__(
        self,
        policy: Policy,
        weights: TrainedWeights,
        *,
        load: Callable[[str | None], Policy],
        named: ReferenceConfig | None,
    ) -> None:
        self._policy, self._weights = policy, weights
        self._load, self._named = load, named
        self._other: Policy | None = None
        self._adapters: dict[str, Tensor] | None = None

    def begin(self) -> None:
        """Take note of the weights of now; only the first call counts."""
        if self._other is not None or self._adapters is not None:
            return
        named, weights = self._named, self._weights
        if isinstance(weights, LoRAWeights) and (not named or named.path == weights.base_path):
            self._adapters = weights.none() if named else weights.now()
        else:
            self._other = self._second_model()

    @contextmanager
    def in_place(self) -> Iterator[Policy]:
        """Give the reference as a policy, for as long as no other is asked for logprobs."""
        self.begin()
        if self._other is not None:
            yield self._other
            return
        assert isinstance(self._weights, LoRAWeights)
        assert self._adapters is not None
        with self._weights.holding(self._adapters):
            yield self._policy

    def kept(self) -> checkpoint.State:
        """Return what a checkpoint keeps of it, once it has begun; to be saved, or loaded into."""
        if self._other is not None:
            return {"reference": checkpoint.named_tensors(self._other.model)}
        return {} if self._adapters is None else {"reference": self._adapters}

    def _second_model(self) -> Policy:
        named = self._named
        other = self._load(named.path if named else None)
        if named:
            check_vocabulary(self._policy.model, other.model, named.path)
        with torch.no_grad():
            now = {} if named else checkpoint.named_tensors(self._policy.model)
            for name, kept in checkpoint.named_tensors(other.model).items():
                kept.copy_(now.get(name, kept))
        other.model.requires_grad_(False)
        return other
