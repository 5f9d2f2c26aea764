"""Models of a trainer besides the policy: extra modules, such as a critic, and the reference.

    samples --> backbone (the policy's own forward, or a second model) --> last hidden states [K, H]
                                                                              |
                                        head of each module (float32) --------+--> [K]

Takes: the modules of an algorithm, the policy, and its trained weights. Gives: outputs of extra
modules for loss tokens, with gradient for a loss and without for a signal; their own AdamW; the
reference as a policy; tensors for checkpoints. Never: publishes these models to engines, or trains
the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import Critic, NormClip
from rollart_core.config.training import Reference as ReferenceConfig
from rollart_core.training import checkpoint, distributed
from rollart_core.training.loading import check_vocabulary
from rollart_core.training.lora import LoRAWeights
from rollart_core.training.optimizer import GuardedAdamW, UpdateOutcome
from rollart_core.training.policy import Policy
from rollart_core.training.signals import computed_rows
from rollart_core.training.trained import TrainedWeights
from rollart_core.types import FloatArray, Sample


class ExtraModules:
    """The extra modules of one algorithm, on this rank.

    Args:
        heads: The modules of the algorithm, by name.
        config: The ``critic`` section.
        trainer: The ``trainer`` section, for the optimizer without its learning rate. Of its
            bounds, only ``grad_clip`` applies.
        policy: The policy.
        backbone: A second model with ``backbone: own``, else None.
    """

    def __init__(
        self,
        heads: dict[str, nn.Module],
        config: Critic,
        trainer: TrainerConfig,
        *,
        policy: Policy,
        backbone: Policy | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._backbone = backbone
        device = next(policy.model.parameters()).device
        self._heads = {name: distributed.shard_head(h, device) for name, h in heads.items()}
        self._began = False
        ours = trainer.model_copy(update={"lr": config.lr, "clip": NormClip()})
        self.optimizer = GuardedAdamW(self._parameters(), ours)
        """Their optimizer."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the signals that they compute."""
        return frozenset(self._heads)

    @property
    def reads_policy(self) -> bool:
        """Whether they read the hidden states of the policy's own forward pass."""
        return self._backbone is None

    def begin(self) -> None:
        """Copy the policy's weights to a second model; only the first call has an effect."""
        if self._backbone is not None and not self._began:
            with torch.no_grad():
                now = checkpoint.named_tensors(self._policy.model)
                for name, own in checkpoint.named_tensors(self._backbone.model).items():
                    own.copy_(now[name])
        self._began = True

    def rows(self, name: str, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        """Return the outputs of one module: ``[T]`` per sample, 0 where not ``loss_mask``."""

        def compute(chosen: Sequence[Sample]) -> Tensor:
            with torch.no_grad():
                hidden = None if self._backbone else self._policy.hidden(chosen)
                return self.says(chosen, hidden)[name]

        reader = self._backbone or self._policy
        found = computed_rows(compute, reader.microbatches, samples, budget)
        for module in {reader.model, *self._heads.values()}:
            distributed.reshard(module)
        return found

    def says(self, samples: Sequence[Sample], hidden: Tensor | None) -> dict[str, Tensor]:
        """Return each module's outputs ``[K]`` for the loss tokens of samples, with gradient.

        Args:
            samples: Samples with loss tokens.
            hidden: ``[K, H]`` of the policy's forward pass, if the modules read it.
        """
        if self._backbone is not None:
            hidden = self._backbone.hidden(samples)
        assert hidden is not None
        if self._config.backbone == "detached":
            hidden = hidden.detach()
        return {name: head(hidden) for name, head in self._heads.items()}

    def zero_grad(self) -> None:
        """Reset all gradients."""
        self.optimizer.zero_grad()

    def reduce_gradients(self, *, is_last: bool) -> None:
        """Set whether the next backward pass is the last before an update."""
        for module in self.modules():
            distributed.reduce_gradients(module, is_last=is_last)

    def is_finite(self) -> bool:
        """Return whether all their gradients are finite; otherwise no model may be updated.

        This is a collective call.
        """
        gradients = [p.grad for p in self._parameters().values() if p.grad is not None]
        squares = [(gradient.float() ** 2).sum() for gradient in gradients]
        total = sum((float(distributed.whole(s)) for s in squares), start=0.0)
        return math.isfinite(total)

    def alone(self, train_step: int) -> bool:
        """Return whether the next train step updates only the extra modules."""
        return train_step < self._config.warmup_train_steps

    def update(self, loss: float, progress: float | None) -> UpdateOutcome:
        """Update with the current gradients; ``progress`` is the used share of ``stop``."""
        return self.optimizer.update(loss, progress=progress)

    def state(self) -> checkpoint.State:
        """Return their state in a checkpoint, to save or to load into."""
        tensors = {name: p.detach() for name, p in self._parameters().items()}
        return {"extras": tensors, "extras_optimizer": self.optimizer.state()}

    def go_on_from(self, train_step: int) -> None:
        """Continue from a loaded checkpoint of that train step."""
        self.optimizer.train_step, self._began = train_step, True

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor of their learning rate."""
        self.optimizer.lr_factor = factor

    def modules(self) -> list[nn.Module]:
        """Return the heads, and the second model if there is one."""
        own = [self._backbone.model] if self._backbone else []
        return [*own, *self._heads.values()]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters: ``values.weight`` of a head, ``backbone.<name>`` of the backbone.

        The output layer of the backbone is never used. If it is tied, it is listed once.
        """
        found = {
            f"{name}.{part}": p
            for name, head in self._heads.items()
            for part, p in head.named_parameters()
        }
        if self._backbone is not None:
            for name, p in self._backbone.model.named_parameters(remove_duplicate=True):
                found[f"backbone.{name}"] = p
        return found


class ReferencePolicy:
    """The reference: a copy of the policy's weights at the first use, or a configured model.

    With LoRA, the copy consists of the base with other adapters, so it needs no second model. The
    base itself needs none either, if the config names it.

    Args:
        policy: The policy.
        weights: The trained weights of the policy.
        load: Loads a model's path (None: the policy's own) as a policy.
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
        """Copy the current weights; only the first call has an effect."""
        if self._other is not None or self._adapters is not None:
            return
        named, weights = self._named, self._weights
        if isinstance(weights, LoRAWeights) and (not named or named.path == weights.base_path):
            self._adapters = weights.none() if named else weights.now()
        else:
            self._other = self._second_model()

    @contextmanager
    def in_place(self) -> Iterator[Policy]:
        """Yield the reference as a policy; use no other policy within the block."""
        self.begin()
        if self._other is not None:
            yield self._other
            return
        assert isinstance(self._weights, LoRAWeights)
        assert self._adapters is not None
        with self._weights.holding(self._adapters):
            yield self._policy

    def modules(self) -> list[nn.Module]:
        """Return the second model, if there is one."""
        return [self._other.model] if self._other else []

    def adapters(self) -> list[Tensor]:
        """Return its adapters, if it has some."""
        return list((self._adapters or {}).values())

    def kept(self) -> checkpoint.State:
        """Return its state in a checkpoint, to save or to load into; empty before ``begin``."""
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
