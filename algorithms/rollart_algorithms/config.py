"""Options of the algorithms. Never imports torch.

Takes: what stands under ``algorithm`` in a run's config. Gives: one frozen model an algorithm.
Never: lets an option pass that has no effect beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rollart_algorithms.options import (
    Aggregation,
    CreditOptions,
    GroupOptions,
    GroupPolicyOptions,
    KlEstimator,
    LossOptions,
    Options,
    RatioPolicyOptions,
    Share,
)
from rollart_core.config.base import NonNegative, Number, Positive

if TYPE_CHECKING:
    from rollart_core.contracts.algorithm import RunFacts


class GRPOConfig(GroupPolicyOptions):
    """Options of ``rollart/GRPO-v1``."""

    loss_aggregation: Aggregation = "sample_mean"


class DrGRPOConfig(GroupPolicyOptions):
    """Options of ``rollart/DrGRPO-v1``."""

    normalise: Literal["group_std", "batch_std", "none"] = "none"
    loss_aggregation: Aggregation = "sample_sum"


class DAPOConfig(GroupPolicyOptions):
    """Options of ``rollart/DAPO-v1``."""

    clip_high: NonNegative = 0.28


class GSPOConfig(GroupPolicyOptions):
    """Options of ``rollart/GSPO-v1``."""

    clip_low: Share = 3e-4
    clip_high: NonNegative = 4e-4
    ratio_level: Literal["sample_mean"] = "sample_mean"
    """One ratio for the whole sample: the geometric mean of its tokens'."""
    loss_aggregation: Aggregation = "sample_mean"


class CISPOConfig(GroupPolicyOptions):
    """Options of ``rollart/CISPO-v1``."""

    clip_low: Share = 1.0
    """The weight is clipped below at ``1 - clip_low`` (1: not at all)."""
    clip_high: NonNegative = 0.28
    """The weight is clipped above at ``1 + clip_high``."""
    dual_clip: None = None
    """None: the weight has its bound already."""

    def token_advantages(self) -> str | None:
        """Return None: the weight has no gradient, so each token keeps its own advantage."""
        return None


class RLOOConfig(GroupPolicyOptions):
    """Options of ``rollart/RLOO-v1``."""

    normalise: Literal["group_std", "batch_std", "none"] = "none"
    loss_aggregation: Aggregation = "sample_sum"


class ReinforcePPConfig(CreditOptions, RatioPolicyOptions):
    """Options of ``rollart/REINFORCEpp-v1``."""

    baseline: Literal["batch_mean", "group_mean"] = "batch_mean"
    """What a reward is compared with: the whole batch's mean alone, or first its group's."""
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"

    def token_advantages(self) -> str | None:
        """Return what makes advantages differ within a sample; None: nothing does."""
        if self.credit == "turn":
            return "credit: turn"
        return "kl_in: reward" if self.kl_coef and self.kl_in == "reward" else None


class PPOConfig(RatioPolicyOptions):
    """Options of ``rollart/PPO-v1``."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whether the reward falls on the last token of the trajectory, or what a turn earned on the
    last token of that turn (all of it on the last, where a reward function gave another reward than
    ``env.step``)."""
    discount: Share = 1.0
    """What a reward, or a value, is worth one ``discount_unit`` earlier."""
    gae_lambda: Share = 1.0
    """How far advantages look ahead before they trust the critic: 0 one ``discount_unit``, 1 to
    the end."""
    discount_unit: Literal["token", "turn"] = "token"
    """Whether ``discount`` and ``gae_lambda`` apply at each token, or only where a turn ends."""
    normalise: Literal["batch_std", "none"] = "batch_std"
    """Whether advantages are made to have mean 0 and standard deviation 1 over the batch's
    tokens."""
    value_coef: Positive = 0.5
    """Weight of the critic's loss."""
    value_clip: Positive | None = 0.2
    """A value counts as moved by at most this from what it was before the first update on the
    batch (none: without bound)."""
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    zero_advantage: Literal["keep"] = "keep"
    """Samples with advantage 0 teach the critic: they are kept."""
    bootstrap_truncated: bool = False
    """After a truncated trajectory the value is the critic's of the last state it has judged, the
    one the last token was chosen in, and not 0: what was cut off is not taken for an end."""

    @model_validator(mode="after")
    def _ppo_options_have_an_effect(self) -> Self:
        if self.discount == 1 and self.gae_lambda == 1:
            self.refuse_idle("with discount: 1 and gae_lambda: 1", "discount_unit")
        if self.mask_truncated:
            self.refuse_idle("with mask_truncated: true", "bootstrap_truncated")
        return self

    def token_advantages(self) -> str | None:
        """Return what makes advantages differ within a sample: always the critic."""
        return "the critic of PPO"

    def run_problems(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield clips that hold nothing, the critic's among them; see :class:`Options`."""
        yield from super().run_problems(run)
        if run.updates_per_batch == 1 and self.value_clip and self.changed("value_clip"):
            yield (
                "value_clip",
                "has no effect with trainer.updates_per_batch: 1, where no value has moved yet; "
                "remove it",
            )


class TOPRConfig(CreditOptions, LossOptions):
    """Options of ``rollart/TOPR-v1``."""

    baseline: Number | Literal["group_mean"] = 0.5
    """Subtracted from each reward: what lies below it is a negative example. ``group_mean``: the
    mean of its group."""
    weight_cap: Positive = 1.0
    """Negative examples are weighted by policy / inference policy of the sample, at most this."""
    loss_aggregation: Aggregation = "sample_sum"


class RAFTPPConfig(RatioPolicyOptions):
    """Options of ``rollart/RAFTpp-v1``."""

    least_reward: Number | None = None
    """Trajectories with at least this reward are trained on (none: those with their group's best
    reward, where the group has others too)."""
    loss_aggregation: Aggregation = "sample_mean"


class GiGPOConfig(GroupOptions, RatioPolicyOptions):
    """Options of ``rollart/GiGPO-v1``."""

    normalise: Literal["group_std", "none"] = "group_std"
    """Whether advantages are divided by the standard deviation of what they are compared with."""
    step_weight: Positive = 1.0
    """Weight of the step's advantage beside that of the whole trajectory."""
    discount: Share = 0.95
    """What a reward is worth one turn earlier, in the returns of steps."""

    def token_advantages(self) -> str | None:
        """Return what makes advantages differ within a sample: always the steps' advantages."""
        return "the step advantage of GiGPO"


class StarPOConfig(GroupPolicyOptions):
    """Options of ``rollart/StarPO-v1``."""

    clip_high: NonNegative = 0.28
    loss_aggregation: Aggregation = "trajectory_mean"
    keep_groups: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a batch's groups that is trained on: those whose rewards vary most."""


class SFTConfig(Options):
    """Options of ``rollart/SFT-v1``."""

    loss_aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over tokens, or mean over samples of each one's token mean."""
    least_reward: Number | None = None
    """Trajectories with a smaller reward are left out (none: all are learned from)."""


class DistillationConfig(RatioPolicyOptions):
    """Options of ``rollart/OPD-v1``."""

    reward_coef: NonNegative = 0.0
    """Weight of the trajectory's reward, less its group's mean, beside the teacher's opinion."""

    def token_advantages(self) -> str | None:
        """Return what makes advantages differ within a sample: always the teacher."""
        return "the teacher's opinion of each token"
