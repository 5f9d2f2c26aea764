"""Algorithms: from groups to per-token advantages, and from logprobs to a loss.

Arrays of the advantage side are numpy, one ``[T]`` row a sample; tensors of the loss side are
torch, packed to ``[N]`` over all tokens of a microbatch. This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from rollart_core.contracts.spec import PluginSpec
from rollart_core.types import FloatArray, Group

if TYPE_CHECKING:
    import torch

Signals = Mapping[str, Sequence[FloatArray]]
"""Signal name -> one ``[T]`` row per sample, samples in the order of groups, members, samples."""

ZeroAdvantage = Literal["train", "skip", "drop"]
"""What becomes of a sample whose advantages are all 0: it is trained like any other; its forward
pass is skipped but it counts in the divisors; or it is not part of the minibatch at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec(PluginSpec):
    """What an algorithm says of itself."""

    paper: str = ""
    """arXiv id."""
    needs_groups: bool = True
    """False when a group of one will do."""


@dataclass(slots=True)
class LossBatch:
    """One microbatch on the device, packed: ``N`` tokens of several samples in a row.

    Row ``i`` of every ``[N]`` tensor speaks of token ``i`` itself (not of its successor); the first
    token of each sample has ``loss_mask`` False.
    """

    loss_mask: torch.Tensor
    """``[N]`` bool."""
    advantages: torch.Tensor
    """``[N]`` float32, 0 where masked."""
    inference_logprobs: torch.Tensor
    """``[N]`` float32."""
    sample_ids: torch.Tensor
    """``[N]`` int64, which sample of the minibatch the token is of."""
    staleness: torch.Tensor
    """``[N]`` int64, in versions, 0 where masked."""
    total_loss_tokens: int
    """Loss tokens of the whole minibatch, over all microbatches and ranks: what means divide by."""
    total_samples: int
    """Samples of the whole minibatch, over all microbatches and ranks."""
    signals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The signals named by ``requires``, ``[N]`` each, such as ``ref_logprobs``, ``entropy``."""


class Algorithm(ABC):
    """Base of algorithms.

    ``requires`` names the signals it wants: ``proximal_logprobs`` (the trainer's own, before the
    first update on the batch), ``ref_logprobs``, ``values``, ``teacher_logprobs``, ``entropy``.
    """

    requires: frozenset[str] = frozenset()
    zero_advantage: ZeroAdvantage = "train"
    """``skip`` and ``drop`` are for losses to which such samples add no gradient."""
    min_group_size: ClassVar[int] = 1

    @abstractmethod
    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return one ``[T]`` row per sample, 0 where ``loss_mask`` is False.

        Statistics of a group use the members it has: failed ones are not in it.
        """

    @abstractmethod
    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this microbatch's share of the minibatch loss, and its metrics.

        Args:
            trainer_logprobs: ``[N]``, with gradient, 0 where ``loss_mask`` is False.
            batch: The microbatch.

        Returns:
            A scalar that already is divided by the minibatch's totals, so that shares add up; and
            metrics as sums over loss tokens (the trainer divides by ``total_loss_tokens``), except
            names ending in ``_max``, which are maxima.
        """

    def extra_modules(self) -> dict[str, torch.nn.Module]:
        """Return further trained modules, such as a critic."""
        return {}
