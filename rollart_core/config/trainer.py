"""The ``trainer`` section of a run config: AdamW, its schedule, clipping, and how it computes.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: imports torch, or knows another section
(:mod:`rollart_core.config.validation.schedule` does).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rollart_core.config.base import (
    MOST,
    Count,
    Fraction,
    LearningRate,
    Positive,
    PositiveInt,
    Seconds,
    Section,
)

SkipAbove = Annotated[float, Field(ge=1, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]


class Schedule(Section):
    """How the learning rate falls after its warm-up."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """``constant``: it does not fall; ``linear``; ``cosine`` (arXiv:1608.03983, equation 5);
    ``wsd``: it stays, and falls linearly at the end (arXiv:2404.06395)."""
    over: Literal["train_steps", "stop"] = "train_steps"
    """What the schedule is as long as: a number of updates, or the run: then the used share of
    ``stop`` (batches or time, whichever is further) is the place in the schedule."""
    num_train_steps: PositiveInt | None = None
    """Updates at which it ends, the warm-up among them (``over: train_steps``); none:
    ``stop.batches`` times ``updates_per_batch``."""
    min_ratio: Fraction = 0.1
    """The learning rate at the end and after it, as a share of ``lr``."""
    decay_share: Share = 0.1
    """The last share of the schedule, in which the rate falls (``kind: wsd``)."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Schedule:
        fields = type(self).model_fields
        changed = {name for name, field in fields.items() if getattr(self, name) != field.default}
        if self.kind == "constant" and changed:
            idle = ", ".join(sorted(changed))
            raise ValueError(f"{idle} has no effect with kind: constant; remove it")
        if self.kind != "wsd" and "decay_share" in changed:
            raise ValueError(f"decay_share has no effect with kind: {self.kind}; remove it")
        if self.over == "stop" and self.num_train_steps is not None:
            raise ValueError("num_train_steps has no effect with over: stop; remove one of the two")
        return self


class NormClip(Section):
    """Gradients are clipped at ``trainer.grad_clip``, and nowhere else."""

    case: ClassVar[str] = "trainer.clip.kind: norm"

    kind: Literal["norm"] = "norm"
    """Says that the bound is fixed."""


class QuantileClip(Section):
    """AutoClip (arXiv:2007.14469): clip at a quantile of the norms so far."""

    case: ClassVar[str] = "trainer.clip.kind: quantile"

    kind: Literal["quantile"] = "quantile"
    """Says that the bound is a quantile."""
    quantile: Share = 0.9
    """Of the last norms, the present one among them."""
    window: PositiveInt = 256
    """How many of the last norms count; the paper takes all."""
    warmup_updates: PositiveInt = 20
    """For so many updates ``trainer.grad_clip`` is the only bound."""
    skip_above: SkipAbove | None = None
    """An update with a norm above so many times the threshold is skipped; none: it is clipped."""

    @model_validator(mode="after")
    def _warm_up_fits(self) -> QuantileClip:
        if self.warmup_updates > self.window:
            raise ValueError(
                f"warmup_updates ({self.warmup_updates}) must be at most window ({self.window})"
            )
        return self


class ZScoreClip(Section):
    """ZClip (arXiv:2504.02507): clip norms that are outliers by their z-score."""

    case: ClassVar[str] = "trainer.clip.kind: zscore"

    kind: Literal["zscore"] = "zscore"
    """Says that the bound is a z-score."""
    z_threshold: Positive = 2.5
    """Norms more than so many standard deviations above the mean are clipped."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.97
    """Of the moving mean and variance of the norms."""
    warmup_updates: Annotated[int, Field(ge=2, le=MOST)] = 25
    """For so many updates ``trainer.grad_clip`` is the only bound; mean and variance begin as
    theirs."""
    skip_above: SkipAbove | None = None
    """An update with a norm above so many times the threshold is skipped; none: it is clipped."""


_CLIPS: dict[str, type[NormClip] | type[QuantileClip] | type[ZScoreClip]] = {
    "norm": NormClip,
    "quantile": QuantileClip,
    "zscore": ZScoreClip,
}


def _which_clip(value: Any) -> str:
    kind = value.get("kind", "norm") if isinstance(value, dict) else value.kind
    return _CLIPS[kind].__name__


Clip = Annotated[
    Annotated[NormClip, Tag("NormClip")]
    | Annotated[QuantileClip, Tag("QuantileClip")]
    | Annotated[ZScoreClip, Tag("ZScoreClip")],
    Discriminator(_which_clip),
]


class Trainer(Section):
    """How weights are updated."""

    lr: LearningRate = 3e-4
    """Of AdamW."""
    warmup_train_steps: Count = 5
    """Train steps over which the learning rate rises to ``lr``."""
    schedule: Schedule = Schedule()
    """What the learning rate does after the warm-up; a word alone, such as ``cosine``, is its
    ``kind``."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of AdamW."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Of AdamW."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of AdamW."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    clip: Clip = NormClip()
    """A bound from the norms so far, below ``grad_clip``: ``kind`` is ``norm`` (none but
    ``grad_clip``), ``quantile`` or ``zscore``; the word alone is enough."""
    max_kl: Positive | None = None
    """Largest KL divergence between the policy before and after an update, measured after it. Above
    that the update is undone and taken with half the step, three times at most; then it is skipped.
    None: not measured. It takes 12 more bytes a trained parameter."""
    updates_per_batch: PositiveInt = 1
    """Optimizer updates (train_steps) per batch of groups; one weight publication follows them."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Tokens in one forward and backward pass; lower it to save memory."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """``native``: CPU functions compiled at first use by the machine's C compiler; ``auto``: where
    there is one."""
    autocast: Literal["off", "bfloat16"] = "off"
    """What matrix products are computed in."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the layer again there:
    less memory, about a third more work. Shared prefixes are then computed for each sample."""
    collective_timeout_s: Seconds | None = None
    """A call among trainer ranks (``runtime.num_trainer_ranks`` above 1) that takes longer has
    failed; none: 600 s."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("clip", mode="before")
    @classmethod
    def _clip_by_name(cls, value: Any) -> Any:
        given = {"kind": value} if isinstance(value, str) else value
        if isinstance(given, Section):
            return given
        if not isinstance(given, dict):
            raise ValueError(f"must be one of {', '.join(_CLIPS)}, or a section, got {value!r}")
        if (kind := given.get("kind", "norm")) not in _CLIPS:
            raise ValueError(f"there is no kind {kind!r}: it is one of {', '.join(_CLIPS)}")
        return given
