"""Algorithms: from groups to per-token advantages, and from logprobs to a loss.

    groups --> advantages(), targets() --> rows [T] of each sample, on numpy
                                                        |
    loss  <--  loss(trainer_logprobs, LossBatch)  <-----+   [N], packed, on torch
                                       outputs of extra_modules(), with gradient

Arrays of the advantage side are numpy, one ``[T]`` row a sample; tensors of the loss side are
torch, packed to ``[N]`` over all tokens of a microbatch. What is known of an episode turn by turn
(spans, rewards, anchor states) :mod:`rollart_algorithms.turns` reads from its record. This
module does not import torch.
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
"""Signal name -> one ``[T]`` row per sample, samples in the order of groups, members, samples.

Row ``i`` speaks of token ``i``, and is 0 where ``loss_mask`` is False. One is computed when it is
first asked for; see :class:`Algorithm` for the names."""

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
    formula: str = ""
    """Advantage and loss in a few lines of plain text, for ``rollart info``."""
    needs_critic: bool = False
    """Whether it learns values: a run with it needs a ``critic`` section, and no other may have
    one."""
    needs_teacher: bool = False
    """Whether it learns from a teacher's logprobs: the same with the section ``teacher``."""
    learns_from: Literal["rollouts", "demonstrations"] = "rollouts"
    """``demonstrations``: its trajectories are those of the environment's ``oracle()``, not of the
    policy: inference logprobs are 0, and groups are as large as the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What of a run config decides whether an algorithm's options fit it.

    The config model of an algorithm may have ``run_problems(run)`` and ``run_warnings(run)``, which
    yield pairs of an option's name and a message. They are asked when the config is loaded.
    """

    updates_per_batch: int
    """``trainer.updates_per_batch``."""
    groups_per_batch: int
    """``rollout.groups_per_batch``."""
    replaces_equal_groups: bool
    """Whether ``rollout.equal_groups`` is ``replace``."""


def _no_rows() -> torch.Tensor:
    """Return ``[0]``: a batch that is made by hand may leave out what its algorithm never reads."""
    import torch

    return torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class LossBatch:
    """One microbatch on the device, packed: ``N`` tokens of several samples in a row.

    Row ``i`` of every ``[N]`` tensor speaks of token ``i`` itself (not of its successor); the first
    token of each sample has ``loss_mask`` False. Samples are never split over microbatches; the
    samples of a trajectory, and the members of a group, may be.
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
    """The signals named by ``requires``, ``[N]`` each, such as ``ref_logprobs``, ``entropy``; and
    what :meth:`Algorithm.targets` gave. All without gradient, 0 where masked."""
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What each of :meth:`Algorithm.extra_modules` says now, ``[N]`` with gradient, 0 where masked:
    ``outputs["values"]`` are the critic's of today, ``signals["values"]`` those from before the
    first update on the batch. ``outputs["entropy"]`` is that of each token's distribution now, if
    the algorithm :attr:`~Algorithm.wants_entropy`."""
    turn_ids: torch.Tensor = field(default_factory=_no_rows)
    """``[N]`` int64: the turn of its trajectory a token was sampled in, -1 where masked."""
    trajectory_ids: torch.Tensor = field(default_factory=_no_rows)
    """``[N]`` int64, which trajectory of the minibatch the token is of."""
    total_trajectories: int = 0
    """Trajectories of the whole minibatch, over all microbatches and ranks."""


class Algorithm(ABC):
    """Base of algorithms.

    ``requires`` names the signals it wants, of these:

    ===================== =========================================================================
    ``proximal_logprobs``  the trainer's own, before the first update on the batch
    ``ref_logprobs``       those of the reference model (``reference``: the weights RL began with)
    ``teacher_logprobs``   those of the teacher, of the tokens the policy sampled (``teacher``)
    ``entropy``            of the trainer's distribution, before the first update on the batch
    *a module's name*      what it said before the first update; see :meth:`extra_modules`
    ===================== =========================================================================

    A penalty in the reward reads them in ``advantages`` (``signals``), one in the loss from
    ``batch.signals``. Rewards are already as ``shaping`` of the run made them.
    """

    requires: frozenset[str] = frozenset()
    zero_advantage: ZeroAdvantage = "train"
    """``skip`` and ``drop`` are for losses to which such samples add no gradient."""
    wants_entropy: bool = False
    """Whether the loss reads ``batch.outputs["entropy"]``, ``[N]`` with gradient."""
    min_effective_groups: int | None = None
    """A batch in which fewer groups than this have an advantage other than 0 has its loss
    multiplied by their number over this; None: it never is."""
    min_group_size: ClassVar[int] = 1

    @abstractmethod
    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return one ``[T]`` row per sample, 0 where ``loss_mask`` is False.

        Statistics of a group use the members it has: failed ones are not in it.

        Raises:
            ValueError: When these groups cannot be learned from; the run ends with the reason.
        """

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return further rows for the loss by name, such as the ``returns`` a critic learns.

        Asked after ``advantages`` of the same groups. They arrive in ``batch.signals``; no name may
        be one of ``requires``.
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
            A scalar that already is divided by the minibatch's totals, so that shares add up; and
            metrics as sums over loss tokens (the trainer divides by ``total_loss_tokens``), except
            names ending in ``_max``, which are maxima. From ``is_weight_mean`` and
            ``is_weight_sq_mean``, the sums of the importance weights and of their squares, the
            trainer also makes ``effective_sample_size``, as a share of the loss tokens.
        """

    def extra_modules(self, hidden_size: int) -> dict[str, torch.nn.Module]:
        """Return further modules to train, by the name of the signal that each computes.

        Each reads the last hidden states ``[K, hidden_size]`` float32 from before the loss tokens
        (what the policy's next token hangs on) and answers ``[K]``. A critic is
        ``{"values": head}``: its value of a token is that of the state the token was chosen in.
        Whose hidden states, and how fast they learn, ``critic`` of the run says.
        """
        return {}
