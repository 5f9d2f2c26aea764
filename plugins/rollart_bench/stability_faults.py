"""Faults that `rollart bench stability` injects into GRPO, from batch :data:`FIRST` on.

Takes: what GRPO takes. Gives: what GRPO gives, but for the batches of the fault, which are counted
from the start of the trainer. Never: of use outside benchmarks and tests.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.plugins import registry
from rollart_core.types import FloatArray, Group

if TYPE_CHECKING:
    import torch

FIRST = 30
"""The first batch with the fault, from 0."""
TIMES = 10.0
"""Factor of the learning rate in :class:`TenfoldRate`."""


class Faulty(Algorithm):
    """GRPO that counts batches."""

    faulty: ClassVar[Container[int]] = range(FIRST, FIRST + 2)
    game: ClassVar[Mapping[str, object]] = {"arms": 2, "turns": 2}
    """Options of the bandit that it is tried on."""
    lr: ClassVar[float] = 2e-3
    min_group_size: ClassVar[int] = 2

    def __init__(self) -> None:
        self._grpo: Algorithm = registry.build("algorithms", "grpo")
        self.requires, self.zero_advantage = self._grpo.requires, self._grpo.zero_advantage
        self._batch = -1

    @property
    def is_faulty(self) -> bool:
        """Whether the batch in training is one with the fault."""
        return self._batch in self.faulty

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return GRPO's advantages."""
        self._batch += 1
        return self._grpo.advantages(groups, signals)

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return GRPO's targets."""
        return self._grpo.targets(groups, signals)

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss."""
        return self._grpo.loss(trainer_logprobs, batch)


class NotFinite(Faulty):
    """Two batches have gradients that are no numbers."""

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss, or NaN."""
        loss, metrics = super().loss(trainer_logprobs, batch)
        return (loss * math.nan if self.is_faulty else loss), metrics


class InvertedRewards(Faulty):
    """What earned more than its group is punished, for some batches."""

    faulty = range(FIRST, FIRST + 10)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return GRPO's advantages, or their opposites."""
        rows = super().advantages(groups, signals)
        return [-row for row in rows] if self.is_faulty else rows


class TenfoldRate(Faulty):
    """The learning rate is :data:`TIMES` what it should be, for five updates.

    Without a guard such a run on four contexts fell from 0.84 to 0.45 (means of 4 batches) and did
    not recover in 20 batches; on one context, or at a third of its rate, the fault does no harm.
    """

    faulty = range(FIRST, FIRST + 5)
    game: ClassVar[Mapping[str, object]] = {"arms": 4, "signs": 4}
    lr = 6e-3

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss; the update that follows has the batch's rate."""
        _multiply_rate(TIMES if self.is_faulty else 1.0)
        return super().loss(trainer_logprobs, batch)


def _multiply_rate(factor: float) -> None:
    """See that the optimizer of this process multiplies its learning rate by ``factor``."""
    from rollart_core.training.optimizer import GuardedAdamW

    original: Any = getattr(GuardedAdamW, "without_fault", GuardedAdamW.update)

    def update(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        configured = optimizer.lr_factor
        optimizer.lr_factor = configured * factor
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            optimizer.lr_factor = configured

    GuardedAdamW.without_fault = original  # type: ignore[attr-defined]
    GuardedAdamW.update = update  # type: ignore[assignment, method-assign]


FAULTS: dict[str, type[Faulty]] = {
    "2 batches without finite gradients": NotFinite,
    "10 batches with inverted rewards": InvertedRewards,
    "5 updates at 10 times the learning rate": TenfoldRate,
}
