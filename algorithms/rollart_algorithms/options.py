"""Base models that the options of several algorithms are made of. Never imports torch.

Takes: the ``algorithm`` section of a run config. Gives: frozen models, which ``config.py`` combines
into one model for each algorithm. Never: accepts an option that has no effect in combination with
the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import MOST, NonNegative, Positive, PositiveInt

if TYPE_CHECKING:
    from rollart_core.contracts.algorithm import RunFacts

DEFAULT_TIS_CAP = 2.0
DEFAULT_MASK_CAP = 5.0
DEFAULT_MASK_FLOOR = 0.5

Share = Annotated[float, Field(ge=0, le=1)]
Aggregation = Literal[
    "token_mean", "sample_mean", "sample_sum", "sample_sum_norm", "trajectory_mean"
]
Correction = Literal["token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "none"]
KlEstimator = Literal["k1", "k2", "k3"]


class Options(BaseModel):
    """Base of all option models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def refuse_idle(self, reason: str, *names: str) -> None:
        """Raise an error if one of these options differs from its default.

        Args:
            reason: Why they have no effect. It follows ``has no effect`` in the message.
            names: The options.

        Raises:
            ValueError: With the name of the first of them.
        """
        for name in self.changed(*names):
            raise ValueError(f"{name} has no effect {reason}; remove one of them")

    def changed(self, *names: str) -> list[str]:
        """Return those of these options that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

    def run_problems(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield (option, problem) for options that do not fit the run.

        Args:
            run: The facts of the run config that matter here.
        """
        yield from ()

    def run_warnings(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield (option, warning) for options that are allowed but often cause problems."""
        yield from ()


class LossOptions(Options):
    """How the losses of tokens become one number, and how the policy is kept near the reference."""

    loss_aggregation: Aggregation = "token_mean"
    """Mean over tokens; or mean over samples of each sample's token mean, of its token sum, or of
    its token sum divided by ``norm_tokens``; or mean over trajectories of each one's token mean."""
    norm_tokens: PositiveInt | None = None
    """With ``loss_aggregation: sample_sum_norm``: the constant that token sums are divided by, such
    as the maximum number of tokens of a sample."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference (the weights at the start of RL)."""
    kl_estimator: KlEstimator = "k3"
    """How the divergence is estimated from the sampled tokens: k1 is the log ratio (in the loss its
    gradient is 0 on average), k2 is half its square, k3 is unbiased and never negative."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the divergence is added to the loss, or subtracted from the reward before advantages
    are computed (then it is the divergence of the policy that sampled)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus. The entropy of each token's distribution, times this weight, is
    subtracted from the token's loss, with gradient. It counters premature convergence."""
    zero_advantage: Literal["keep", "drop"] = "keep"
    """``keep``: the loss is divided by all sampled tokens (samples, trajectories) of the batch.
    ``drop``: samples whose advantages are all 0 are not counted. As more groups are solved the
    divisor shrinks, and the remaining samples get more and more weight."""
    mask_truncated: bool = False
    """Truncated trajectories give no gradient. Their rewards still count in baselines and standard
    deviations, and their tokens in the divisor."""

    @model_validator(mode="after")
    def _loss_options_have_an_effect(self) -> Self:
        if self.loss_aggregation == "sample_sum_norm" and self.norm_tokens is None:
            raise ValueError("loss_aggregation: sample_sum_norm needs norm_tokens")
        if self.loss_aggregation != "sample_sum_norm":
            self.refuse_idle(f"with loss_aggregation: {self.loss_aggregation}", "norm_tokens")
        if not self.kl_coef:
            self.refuse_idle("with kl_coef: 0", "kl_estimator", "kl_in")
        if self.zero_advantage == "drop":
            self._refuse_terms_of_dropped_samples()
        return self

    def _refuse_terms_of_dropped_samples(self) -> None:
        """Reject terms of the loss that would lose the tokens of dropped samples."""
        terms = {"entropy_coef": bool(self.entropy_coef)}
        terms["kl_coef (kl_in: loss)"] = bool(self.kl_coef) and self.kl_in == "loss"
        for name, is_used in terms.items():
            if is_used:
                raise ValueError(
                    f"zero_advantage: drop removes samples without advantage from the loss, and "
                    f"also their share of {name}; set zero_advantage: keep"
                )

    def run_warnings(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Warn about a shrinking divisor; see :class:`Options`."""
        if self.zero_advantage == "drop":
            yield (
                "zero_advantage",
                "drop divides the loss only by the samples with an advantage: the divisor shrinks "
                "during training, and a rare failure can then weigh as much as a whole batch; "
                "keep divides by all sampled tokens",
            )


class CreditOptions(Options):
    """Which tokens a reward is credited to."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whether all tokens of a trajectory share its reward, or the tokens of a turn are credited
    with the rewards from that turn on. The reward of a turn is that of ``env.step`` if these add up
    to the trajectory's reward. If a reward function replaced it, the last turn gets all of it."""
    discount: Share = 1.0
    """With ``credit: turn``: factor on a reward for each turn that it lies ahead."""

    @model_validator(mode="after")
    def _credit_options_have_an_effect(self) -> Self:
        if self.credit != "turn":
            self.refuse_idle(f"with credit: {self.credit}", "discount")
        return self


class OffPolicyOptions(Options):
    """How tokens are handled that another policy sampled than the one being trained."""

    proximal: Literal["recompute", "inference"] = "recompute"
    """The policy that the ratio is computed against: ``recompute`` is the trainer's own before the
    first update on the batch (tokens are then reweighted, see ``importance_correction``),
    ``inference`` is the policy that sampled the token."""
    importance_correction: Correction = "token_truncate"
    """With ``proximal: recompute``: tokens are weighted by proximal / inference policy, of the
    token or of the whole sample, truncated at ``tis_cap``; or masked outside the range from
    ``mask_floor`` to ``tis_cap``; or not weighted."""
    tis_cap: Positive | None = None
    """Importance weights above this are truncated or masked. Default: 2.0, or 5.0 for a mask."""
    mask_floor: NonNegative | None = None
    """With a mask: importance weights below this are masked. Default: 0.5."""
    staleness_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A token's loss is multiplied by this once for each version of its staleness."""

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
        """The range of importance weights in which tokens are kept."""
        floor = DEFAULT_MASK_FLOOR if self.mask_floor is None else self.mask_floor
        return floor, self.tis_cap or DEFAULT_MASK_CAP


class RatioPolicyOptions(OffPolicyOptions, LossOptions):
    """How far the policy can move on one batch, and the level of its ratio."""

    clip_low: Share = 0.2
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped above at ``1 + clip_high``."""
    ratio_level: Literal["token", "sample_mean", "sample_sum"] = "token"
    """Whether there is one ratio per token or one per sample. ``sample_mean`` is the geometric mean
    of the token ratios (the gradient of each token follows its own advantage). ``sample_sum`` is
    their product (it needs one advantage for the whole sample)."""
    dual_clip: Annotated[float, Field(gt=1, le=MOST)] | None = None
    """Upper bound of the ratio for negative advantages. null: no bound."""

    clipped: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    """Options that have an effect only if the ratio differs from 1."""

    @model_validator(mode="after")
    def _product_has_one_advantage(self) -> Self:
        if self.ratio_level == "sample_sum" and (why := self.token_advantages()):
            raise ValueError(
                f"ratio_level: sample_sum is one ratio and one advantage for the whole sample, but "
                f"{why} gives each token or turn its own; use ratio_level: token or sample_mean"
            )
        return self

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample; None if there is none."""
        return None

    def run_problems(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield clips that have no effect; see :class:`Options`."""
        yield from super().run_problems(run)
        if run.updates_per_batch > 1 or self.proximal == "inference":
            return
        for name in self.changed(*self.clipped):
            yield (
                name,
                "has no effect with trainer.updates_per_batch: 1 and proximal: recompute, because "
                "the ratio is always 1; remove it, or set proximal: inference or more updates",
            )


class GroupOptions(Options):
    """How the members of a group are normalised."""

    normalise: Literal["group_std", "batch_std", "none"] = "group_std"
    """Whether advantages are divided by the standard deviation of the group's rewards, or by that
    of the whole batch."""
    std_correction: Literal[0, 1] = 0
    """0: variances are divided by the count. 1: by the count minus 1 (Bessel), as in TRL, verl."""
    std_floor: NonNegative = 0.0
    """Lower bound of a standard deviation. Without it, one rare failure in a group of successes
    gets an advantage of several units."""
    min_effective_groups: PositiveInt | None = None
    """If fewer groups of a batch than this have an advantage other than 0, the loss is multiplied
    by their number divided by this. null: the loss is never scaled."""

    @model_validator(mode="after")
    def _group_options_have_an_effect(self) -> Self:
        if self.normalise == "none":
            self.refuse_idle("with normalise: none", "std_correction", "std_floor")
        return self

    def run_problems(self, run: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield a number of groups that no batch has, or that every batch has."""
        yield from super().run_problems(run)
        least = self.min_effective_groups
        if least is None:
            return
        if least > run.groups_per_batch:
            yield (
                "min_effective_groups",
                f"{least} is more than rollout.groups_per_batch ({run.groups_per_batch}): every "
                f"batch would be scaled down; set it to {run.groups_per_batch} or less",
            )
        elif run.replaces_equal_groups:
            yield (
                "min_effective_groups",
                "has no effect with rollout.equal_groups: replace, which fills each batch with "
                "groups that carry signal; remove one of them",
            )


class GroupPolicyOptions(GroupOptions, CreditOptions, RatioPolicyOptions):
    """Base options of algorithms that compare the members of a group."""

    def token_advantages(self) -> str | None:
        """Return the cause of different advantages within a sample; None if there is none."""
        return "credit: turn" if self.credit == "turn" else None
