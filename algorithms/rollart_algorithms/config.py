"""Options of the algorithms. Never imports torch.

Takes: the ``algorithm`` section of a run config. Gives: one frozen model for each algorithm.
Never: accepts an option that has no effect in combination with the others.
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
    """One ratio for the whole sample: the geometric mean of its tokens' ratios."""
    loss_aggregation: Aggregation = "sample_mean"


class CISPOConfig(GroupPolicyOptions):
    """Options of ``rollart/CISPO-v1``."""

    clip_low: Share = 1.0
    """The weight is clipped below at ``1 - clip_low``. 1 disables this clip."""
    clip_high: NonNegative = 0.28
    """The weight is clipped above at ``1 + clip_high``."""
    dual_clip: None = None
    """Not available (None): the weight is already bounded."""

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
    """What a reward is compared with: the batch mean only, or first the mean of its group."""
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample; None if there is none."""
        if self.credit == "turn":
            return "credit: turn"
        return "kl_in: reward" if self.kl_coef and self.kl_in == "reward" else None


class PPOConfig(RatioPolicyOptions):
    """Options of ``rollart/PPO-v1``."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whether the whole reward is placed on the last token of the trajectory, or the reward of each
    turn on the last token of that turn. If a reward function replaced the reward of ``env.step``,
    the last turn gets the whole reward."""
    discount: Share = 1.0
    """Factor on a reward or value for each ``discount_unit`` that it lies ahead."""
    gae_lambda: Share = 1.0
    """How far advantages look ahead before they rely on the critic: 0 is one ``discount_unit``, 1
    is until the end."""
    discount_unit: Literal["token", "turn"] = "token"
    """Whether ``discount`` and ``gae_lambda`` apply at each token, or only at the end of a turn."""
    normalise: Literal["batch_std", "none"] = "batch_std"
    """Whether advantages are normalised to mean 0 and standard deviation 1 over the tokens of the
    batch."""
    value_coef: Positive = 0.5
    """Weight of the critic's loss."""
    value_clip: Positive | None = 0.2
    """In the critic's loss, a value can differ by at most this from its value before the first
    update on the batch. null: not clipped."""
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    zero_advantage: Literal["keep"] = "keep"
    """Samples with advantage 0 are kept, because they train the critic."""
    bootstrap_truncated: bool = False
    """Whether the value after a truncated trajectory is the critic's value of the last state that
    it scored (the state in which the last token was chosen) instead of 0. A truncation is then not
    treated as the end of the episode."""

    @model_validator(mode="after")
    def _ppo_options_have_an_effect(self) -> Self:
        if self.discount == 1 and self.gae_lambda == 1:
            self.refuse_idle("with discount: 1 and gae_lambda: 1", "discount_unit")
        if self.mask_truncated:
            self.refuse_idle("with mask_truncated: true", "bootstrap_truncated")
        return self

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample: always the critic."""
        return "the critic of PPO"

    def run_problems(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield clips that have no effect, including the critic's; see :class:`Options`."""
        yield from super().run_problems(run)
        if run.updates_per_batch == 1 and self.value_clip and self.changed("value_clip"):
            yield (
                "value_clip",
                "has no effect with trainer.updates_per_batch: 1, because values have not moved "
                "yet; remove it",
            )


class TOPRConfig(CreditOptions, LossOptions):
    """Options of ``rollart/TOPR-v1``."""

    baseline: Number | Literal["group_mean"] = 0.5
    """Subtracted from each reward. A trajectory below it is a negative example. ``group_mean``: the
    mean of the trajectory's group."""
    weight_cap: Positive = 1.0
    """Upper bound of the weight of negative examples: policy / inference policy of the sample."""
    loss_aggregation: Aggregation = "sample_sum"


class RAFTPPConfig(RatioPolicyOptions):
    """Options of ``rollart/RAFTpp-v1``."""

    least_reward: Number | None = None
    """Trajectories with at least this reward are trained on. null: those with the best reward of
    their group, if the rewards of the group differ."""
    loss_aggregation: Aggregation = "sample_mean"


class GiGPOConfig(GroupOptions, RatioPolicyOptions):
    """Options of ``rollart/GiGPO-v1``."""

    normalise: Literal["group_std", "none"] = "group_std"
    """Whether advantages are divided by the standard deviation of the returns they compare."""
    step_weight: Positive = 1.0
    """Weight of the step advantage relative to the advantage of the whole trajectory."""
    discount: Share = 0.95
    """Factor on a reward for each turn that it lies ahead, in the returns of steps."""

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample: always the step advantages."""
        return "the step advantage of GiGPO"


class StarPOConfig(GroupPolicyOptions):
    """Options of ``rollart/StarPO-v1``."""

    clip_high: NonNegative = 0.28
    loss_aggregation: Aggregation = "trajectory_mean"
    keep_groups: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a batch's groups that are trained on: those whose rewards vary most."""


class SFTConfig(Options):
    """Options of ``rollart/SFT-v1``."""

    loss_aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens, or mean over samples of each sample's token mean."""
    least_reward: Number | None = None
    """Trajectories with a smaller reward are left out. null: all trajectories are used."""


class DistillationConfig(RatioPolicyOptions):
    """Options of ``rollart/OPD-v1``."""

    reward_coef: NonNegative = 0.0
    """Weight of the trajectory's reward minus its group mean, added to the teacher's advantage."""

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample: always the teacher."""
        return "the teacher's score of each token"
