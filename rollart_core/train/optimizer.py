"""AdamW with a warm-up, clipped gradients, and a guard against numbers that are not finite.

Takes: parameters that hold gradients. Gives: one update, or none when loss or gradient are not
finite; several such in a row are an error. Never: computes a loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart_core.config import Trainer as TrainerConfig
from rollart_core.errors import TrainingDiverged
from rollart_core.train import distributed

MAX_SKIPPED = 3
"""So many updates in a row without a finite loss and gradient end the run."""


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What became of one update."""

    grad_norm: float
    """Before clipping."""
    lr: float
    updated: bool


class GuardedAdamW:
    """AdamW over named parameters (arXiv:1711.05101, algorithm 2).

    Args:
        parameters: Name -> parameter; matrices decay, vectors do not.
        config: Learning rate, warm-up, betas and so on.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainerConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._skipped = 0
        self.train_step = 0
        self.lr_factor = 1.0
        """What the configured learning rate is multiplied by."""
        every = list(parameters.values())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in every if p.dim() > 1]},
            {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def update(self, loss: float, lr: float | None = None, *, holds: bool = False) -> UpdateOutcome:
        """Clip, check, and update with the gradients the parameters hold.

        Args:
            loss: The loss those gradients are of.
            lr: Learning rate; None for the configured one with its warm-up.
            holds: Leave the parameters as they are: the train step counts all the same.

        Raises:
            TrainingDiverged: At the third update in a row that is not finite.
        """
        if lr is None:
            lr = self._config.lr * self.lr_factor
            lr *= min(1.0, (self.train_step + 1) / max(1, self._config.warmup_train_steps))
        norm = float(
            distributed.clip_gradients(list(self._parameters.values()), self._config.grad_clip)
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(loss, norm)
            return UpdateOutcome(norm, lr, updated=False)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        if not holds:
            self._adamw.step()
        self._skipped = 0
        self.train_step += 1
        return UpdateOutcome(norm, lr, updated=True)

    def go_on_from(self, train_step: int) -> None:
        """Go on from a checkpoint that was loaded."""
        self.train_step = train_step
        self._skipped = 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments and step counts by parameter name; to be saved, or loaded into."""
        for p in self._parameters.values():
            if not self._adamw.state[p]:
                self._adamw.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return {name: dict(self._adamw.state[p]) for name, p in self._parameters.items()}

    def _skip(self, loss: float, norm: float) -> None:
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise TrainingDiverged(
                f"{self._skipped} updates in a row were not finite (loss {loss}, gradient norm "
                f"{norm}) after train_step {self.train_step}: lower trainer.lr (it is "
                f"{self._config.lr}) or trainer.grad_clip, or look at the rewards"
            )
