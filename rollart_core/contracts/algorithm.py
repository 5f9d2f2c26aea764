"""Algorithms: from groups to per-token advantages, and from logprobs to a loss.

    groups --> advantages(), targets() --> rows [T] of each sample, on numpy
                                                        |
    loss  <--  loss(trainer_logprobs, LossBatch)  <-----+   [N], packed, on torch
                                       outputs of extra_modules(), with gradient

Advantages use numpy arrays, one ``[T]`` row per sample. Losses use torch tensors, packed to ``[N]``
over all tokens of a microbatch. :mod:`rollart_algorithms.turns` reads the facts of each turn
(spans, rewards, anchor states) from the record of an episode. This module does not import torch.
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
"""Signal name -> one ``[T]`` row per sample, in the order of groups, members and samples.

Element ``i`` belongs to token ``i`` and is 0 where ``loss_mask`` is False. A signal is computed at
its first use. :class:`Algorithm` lists the names."""

ZeroAdvantage = Literal["train", "skip", "drop"]
"""How to treat a sample whose advantages are all 0. ``train``: train on it like any other.
``skip``: skip its forward pass, but count it in the divisors. ``drop``: exclude it from the
minibatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec(PluginSpec):
    """The spec of an algorithm."""

    paper: str = ""
    """The arXiv id of the paper."""
    needs_groups: bool = True
    """False if a group of one is sufficient."""
    formula: str = ""
    """Advantage and loss in a few lines of plain text, for ``rollart info``."""
    needs_critic: bool = False
    """Whether the algorithm trains a critic. Its runs need a ``critic`` section. Other runs must
    not have one."""
    needs_teacher: bool = False
    """Whether the algorithm uses a teacher's logprobs. Its runs need a ``teacher`` section. Other
    runs must not have one."""
    learns_from: Literal["rollouts", "demonstrations"] = "rollouts"
    """``rollouts``: the policy generates the trajectories. ``demonstrations``: the environment's
    ``oracle()`` does. Then inference logprobs are 0, and groups have the size in the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The values of a run config that an algorithm's options are validated against.

    The config model of an algorithm may have ``run_problems(run)`` and ``run_warnings(run)``, which
    yield pairs of an option's name and a message. RollArt calls them when it loads the config.
    """

    updates_per_batch: int
    """``trainer.updates_per_batch``."""
    groups_per_batch: int
    """``rollout.groups_per_batch``."""
    replaces_equal_groups: bool
    """Whether ``rollout.equal_groups`` is ``replace``."""


def _no_rows() -> torch.Tensor:
    """Return an empty ``[0]`` tensor: the default of fields that a hand-made batch may omit."""
    import torch

    return torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class LossBatch:
    """One microbatch on the device: the ``N`` tokens of several samples, packed in one row.

    Element ``i`` of every ``[N]`` tensor belongs to token ``i`` itself, not to its successor. The
    first token of each sample has ``loss_mask`` False. A sample is never split over microbatches.
    The samples of a trajectory and the members of a group may be in different microbatches.
    """

    loss_mask: torch.Tensor
    """``[N]`` bool. True for tokens that the policy sampled."""
    advantages: torch.Tensor
    """``[N]`` float32. The advantage of each token, 0 where masked."""
    inference_logprobs: torch.Tensor
    """``[N]`` float32. Logprobs that the inference engine recorded at sampling."""
    sample_ids: torch.Tensor
    """``[N]`` int64. Index of the token's sample in the minibatch."""
    staleness: torch.Tensor
    """``[N]`` int64. Staleness of each token in policy versions, 0 where masked."""
    total_loss_tokens: int
    """Number of loss tokens in the minibatch, over all microbatches and ranks. The divisor of
    means."""
    total_samples: int
    """Number of samples in the minibatch, over all microbatches and ranks."""
    signals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Signal name -> ``[N]`` without gradient, 0 where masked. Contains the signals in
    ``requires``, such as ``ref_logprobs`` and ``entropy``, and the result of
    :meth:`Algorithm.targets`."""
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Module name -> current output of each module of :meth:`Algorithm.extra_modules`, ``[N]`` with
    gradient, 0 where masked. ``outputs["values"]`` are the critic's current values.
    ``signals["values"]`` are those from before the first update on the batch.
    ``outputs["entropy"]`` is the current entropy of each token's distribution, if
    :attr:`~Algorithm.wants_entropy` is true."""
    turn_ids: torch.Tensor = field(default_factory=_no_rows)
    """``[N]`` int64. The turn of the trajectory in which the token was sampled, -1 where masked."""
    trajectory_ids: torch.Tensor = field(default_factory=_no_rows)
    """``[N]`` int64. Index of the token's trajectory in the minibatch."""
    total_trajectories: int = 0
    """Number of trajectories in the minibatch, over all microbatches and ranks."""


class Algorithm(ABC):
    """Base class of algorithms.

    ``requires`` names the signals that the algorithm uses. The signals are:

    ===================== =========================================================================
    ``proximal_logprobs``  of the trainer, before the first update on the batch
    ``ref_logprobs``       of the reference model (``reference``: the initial weights)
    ``teacher_logprobs``   of the teacher, for the tokens that the policy sampled
    ``entropy``            of the trainer's distribution, before the first update on the batch
    *a module's name*      its output before the first update; see :meth:`extra_modules`
    ===================== =========================================================================

    For a penalty in the reward, read ``signals`` in ``advantages``. For a penalty in the loss, read
    ``batch.signals``. The run's ``shaping`` is already applied to the rewards.
    """

    requires: frozenset[str] = frozenset()
    zero_advantage: ZeroAdvantage = "train"
    """How to treat samples whose advantages are all 0. ``skip`` and ``drop`` are for losses to
    which such samples add no gradient."""
    wants_entropy: bool = False
    """Whether the loss reads ``batch.outputs["entropy"]``, ``[N]`` with gradient."""
    min_effective_groups: int | None = None
    """Minimum number of groups with a nonzero advantage. If a batch has fewer, its loss is
    multiplied by their number divided by this value. None disables the scaling."""
    min_group_size: ClassVar[int] = 1
    """Smallest group size that the algorithm accepts."""

    @abstractmethod
    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return one ``[T]`` row per sample, 0 where ``loss_mask`` is False.

        Group statistics use the members that are present. Failed trajectories are not in a group.

        Raises:
            ValueError: If the algorithm cannot learn from these groups. The run ends with the
                message.
        """

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return further rows for the loss by name, such as the ``returns`` that a critic learns.

        RollArt calls this after ``advantages`` of the same groups. The rows are in
        ``batch.signals``. No name may be in ``requires``.
        """
        return {}

    @abstractmethod
    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this microbatch's share of the minibatch loss, and its metrics.

        Args:
            trainer_logprobs: ``[N]``, with gradient, 0 where ``loss_mask`` is False.
            batch: The microbatch.

        Returns:
            A scalar that is already divided by the minibatch's totals, so that the shares add up,
            and metrics as sums over loss tokens (the trainer divides by ``total_loss_tokens``).
            Names that end in ``_max`` are maxima instead. From ``is_weight_mean`` and
            ``is_weight_sq_mean``, the sums of the importance weights and of their squares, the
            trainer also computes ``effective_sample_size``, as a share of the loss tokens.
        """

    def extra_modules(self, hidden_size: int) -> dict[str, torch.nn.Module]:
        """Return further modules to train, keyed by the signal that each computes.

        Each module maps the last hidden states ``[K, hidden_size]`` float32 at the positions before
        the loss tokens to ``[K]``. A critic is ``{"values": head}``. Its value of a token is the
        value of the state in which the token was chosen. The run's ``critic`` section sets the
        source of the hidden states and the learning rate.
        """
        return {}
