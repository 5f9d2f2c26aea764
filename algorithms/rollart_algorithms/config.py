"""Options of the algorithms, made of parts that several share. Never imports torch.

Takes: what stands under ``algorithm`` in a run's config. Gives: one frozen model an algorithm.
Never: lets an option pass that has no effect beside the others.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_TIS_CAP = 2.0
DEFAULT_MASK_CAP = 5.0
DEFAULT_MASK_FLOOR = 0.5

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Aggregation = Literal[
    "token_mean", "sample_mean", "sample_sum", "sample_sum_norm", "trajectory_mean"
]
Correction = Literal["token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "none"]
KlEstimator = Literal["k1", "k2", "k3"]


class Options(BaseModel):
    """What all models of options have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def refuse_idle(self, reason: str, *names: str) -> None:
        """Raise where one of these options differs from its default.

        Args:
            reason: Why they have no effect, after ``has no effect``.
            names: The options.

        Raises:
            ValueError: Naming the first of them.
        """
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect {reason}; remove one of them")


class LossOptions(Options):
    """How the losses of tokens become one number, and what keeps the policy near the reference."""

    loss_aggregation: Aggregation = "token_mean"
    """Mean over tokens; or mean over samples of each one's token mean, of its token sum, or of its
    token sum divided by ``norm_tokens``; or mean over trajectories of each one's token mean."""
    norm_tokens: Annotated[int, Field(ge=1)] | None = None
    """With ``loss_aggregation: sample_sum_norm``: the constant that token sums are divided by, such
    as the most tokens a sample can have."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference (the weights RL began with)."""
    kl_estimator: KlEstimator = "k3"
    """How the divergence is estimated from the sampled tokens: k1 is the log ratio (in the loss its
    gradient is 0 on average), k2 half its square, k3 never negative and unbiased."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the divergence is added to the loss, or subtracted from the reward before advantages
    are taken (then it is that of the policy that sampled)."""
    zero_advantage: Literal["drop", "keep"] = "drop"
    """Whether samples that teach nothing are dropped from the batch and its divisors, or kept."""

    @model_validator(mode="after")
    def _loss_options_have_an_effect(self) -> Self:
        if self.loss_aggregation == "sample_sum_norm" and self.norm_tokens is None:
            raise ValueError("loss_aggregation: sample_sum_norm needs norm_tokens")
        if self.loss_aggregation != "sample_sum_norm":
            self.refuse_idle(f"with loss_aggregation: {self.loss_aggregation}", "norm_tokens")
        if not self.kl_coef:
            self.refuse_idle("with kl_coef: 0", "kl_estimator", "kl_in")
        return self


class CreditOptions(Options):
    """Which tokens a reward is credited to."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whether all tokens of a trajectory share its reward, or those of a turn are credited with
    what was earned from that turn on. A turn earns what ``env.step`` answered, as long as that adds
    up to the reward; where a reward function gave another, the last turn earned all of it."""
    discount: Share = 1.0
    """With ``credit: turn``: what a reward is worth one turn earlier."""

    @model_validator(mode="after")
    def _credit_options_have_an_effect(self) -> Self:
        if self.credit != "turn":
            self.refuse_idle(f"with credit: {self.credit}", "discount")
        return self


class OffPolicyOptions(Options):
    """What is done about tokens that another policy sampled than the one being trained."""

    proximal: Literal["recompute", "inference"] = "recompute"
    """Which policy the ratio is taken against: the trainer's own before the first update on the
    batch (tokens are then reweighted, see ``importance_correction``), or the one that sampled the
    token."""
    importance_correction: Correction = "token_truncate"
    """With ``proximal: recompute``: tokens are weighted by proximal / inference policy, of the
    token or of the whole sample, truncated at ``tis_cap``; or masked where outside ``mask_floor``
    to ``tis_cap``; or not weighted."""
    tis_cap: Positive | None = None
    """Importance weights are truncated at, or masked above this (none: 2.0, or 5.0 to mask)."""
    mask_floor: NonNegative | None = None
    """With a mask: importance weights below this are masked (none: 0.5)."""
    staleness_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A token's loss is multiplied by this once for each version that it is stale."""

    @model_validator(mode="after")
    def _off_policy_options_have_an_effect(self) -> Self:
        corrections = ("tis_cap", "importance_correction", "mask_floor")
        if self.proximal == "inference":
            self.refuse_idle("with proximal: inference", *corrections)
        given = f"with importance_correction: {self.importance_correction}"
        if self.importance_correction == "none":
            self.refuse_idle(given, "tis_cap", "mask_floor")
        if self.importance_correction.endswith("_truncate"):
            self.refuse_idle(given, "mask_floor")
        elif self.mask_bounds[0] >= self.mask_bounds[1]:
            raise ValueError("mask_floor must be below tis_cap, or every token is masked")
        return self

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """The importance weights between which tokens are kept."""
        floor = DEFAULT_MASK_FLOOR if self.mask_floor is None else self.mask_floor
        return floor, self.tis_cap or DEFAULT_MASK_CAP


class RatioPolicyOptions(OffPolicyOptions, LossOptions):
    """How far the policy may move on one batch, and of what its ratio is."""

    clip_low: Share = 0.2
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped above at ``1 + clip_high``."""
    ratio_level: Literal["token", "sample_mean", "sample_sum"] = "token"
    """Whether a ratio is that of a token; or one for the whole sample, the geometric mean of its
    tokens' or their product."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Where the advantage is negative, the ratio counts as at most this (none: without bound)."""


class GroupOptions(Options):
    """What members of a group are measured by."""

    normalise: Literal["group_std", "batch_std", "none"] = "group_std"
    """Whether advantages are divided by the standard deviation of the group's rewards, or of the
    whole batch's."""
    std_correction: Literal[0, 1] = 0
    """0: standard deviations divide by the count; 1: by one less (Bessel), as TRL and verl do."""

    @model_validator(mode="after")
    def _group_options_have_an_effect(self) -> Self:
        if self.normalise == "none":
            self.refuse_idle("with normalise: none", "std_correction")
        return self


class GroupPolicyOptions(GroupOptions, CreditOptions, RatioPolicyOptions):
    """The parts of algorithms that compare members of a group."""


class GRPOConfig(GroupPolicyOptions):
    """Options of ``rollart/GRPO-v1``."""

    clip_high: NonNegative = 0.28
    """The ratio is clipped above at ``1 + clip_high`` (clip-higher)."""


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

    @model_validator(mode="after")
    def _unit_has_an_effect(self) -> Self:
        if self.discount == 1 and self.gae_lambda == 1:
            self.refuse_idle("with discount: 1 and gae_lambda: 1", "discount_unit")
        return self


class TOPRConfig(CreditOptions, LossOptions):
    """Options of ``rollart/TOPR-v1``."""

    baseline: Annotated[float, Field(allow_inf_nan=False)] | Literal["group_mean"] = 0.5
    """Subtracted from each reward: what lies below it is a negative example. ``group_mean``: the
    mean of its group."""
    weight_cap: Positive = 1.0
    """Negative examples are weighted by policy / inference policy of the sample, at most this."""
    loss_aggregation: Aggregation = "sample_sum"


class RAFTPPConfig(RatioPolicyOptions):
    """Options of ``rollart/RAFTpp-v1``."""

    least_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
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
    least_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Trajectories with a smaller reward are left out (none: all are learned from)."""


class DistillationConfig(RatioPolicyOptions):
    """Options of ``rollart/OPD-v1``."""

    reward_coef: NonNegative = 0.0
    """Weight of the trajectory's reward, less its group's mean, beside the teacher's opinion."""
