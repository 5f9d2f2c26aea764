"""Sections of a run config that say how weights are updated, and what is trained beside the policy.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config; and :class:`AuxiliaryModels`, which travels with them to every trainer rank. Never: imports
torch, or a plugin's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rollart_core.config.base import (
    MOST,
    Count,
    Fraction,
    LearningRate,
    Number,
    PluginRef,
    Positive,
    PositiveInt,
    Processes,
    Seconds,
    Section,
)
from rollart_core.errors import ConfigError

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


class Critic(Section):
    """How the critic of an algorithm that has one (``ppo``) is built and taught."""

    backbone: Literal["own", "shared", "detached"] = "own"
    """What its head reads: the hidden states of a second model, which begins as the policy and is
    taught with the head (twice the memory); those of the policy, which is then also taught to
    value states; or those of the policy as they are."""
    lr: LearningRate = 1e-3
    """Of its own AdamW; all else of it is as ``trainer`` says."""
    warmup_train_steps: Count = 0
    """Train steps at the beginning that teach the critic alone, and leave the policy as it is."""


class LoRA(Section):
    """Train adapters of low rank beside a frozen model (arXiv:2106.09685), not the model."""

    rank: PositiveInt = 16
    """Of each adapter: more learns more, and takes more memory."""
    alpha: Positive = 32.0
    """What an adapter gives is multiplied by ``alpha / rank``."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Which matrices of every decoder layer have one, such as ``[q_proj, v_proj]``; none: all."""
    sync: Literal["merged", "adapter"] = "merged"
    """What engines are sent: whole weights, the adapters added; or the adapters alone, which an
    engine that can (``embedded``) adds to its own copy of the base: far less is sent."""

    @model_validator(mode="after")
    def _adapts_something(self) -> LoRA:
        if self.target_modules == ():
            raise ValueError("target_modules names nothing to adapt; leave it out to adapt all")
        return self


class Reference(Section):
    """The model whose logprobs a KL penalty compares the policy's to."""

    path: Annotated[str, Field(min_length=1)]
    """A model's folder or hub id, with the vocabulary of the policy."""


class Teacher(Section):
    """The model that an algorithm which distils (``opd``) learns from."""

    path: Annotated[str, Field(min_length=1)]
    """A model's folder or hub id, with the vocabulary of the policy."""
    engine: PluginRef = PluginRef(id="embedded")
    """What runs it: an inference engine that can score given tokens."""
    num_engines: Processes = 1
    """How many of them; trajectories take turns."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of its weights."""


class Overlong(Section):
    """The soft punishment of long answers (DAPO, arXiv:2503.14476, section 3.4)."""

    max_tokens: PositiveInt
    """An episode with more sampled tokens than this loses all of ``penalty``."""
    buffer_tokens: PositiveInt
    """The loss begins so many tokens before that, and grows linearly."""
    penalty: Positive = 1.0
    """What is taken off the reward at most."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Overlong:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens ({self.buffer_tokens}) cannot be more than max_tokens "
                f"({self.max_tokens})"
            )
        return self


class Shaping(Section):
    """What rewards become on their way to the algorithm; records keep them as they were.

    In this order: ``overlong``, ``normalise``, ``scale``, ``clip``.
    """

    overlong: Overlong | None = None
    """A penalty on long episodes; none: there is none."""
    normalise: Literal["none", "running"] = "none"
    """``running``: less the mean, over the standard deviation, of all rewards of its environment so
    far: rewards of several environments come to one size."""
    scale: Positive = 1.0
    """They are multiplied by it."""
    clip: tuple[Number, Number] | None = None
    """Least and greatest reward; none: no limit."""

    @model_validator(mode="after")
    def _does_something(self) -> Shaping:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip: {self.clip[0]:g} must be below {self.clip[1]:g}")
        fields = type(self).model_fields
        if all(getattr(self, name) == field.default for name, field in fields.items()):
            raise ValueError("shaping without any of its keys does nothing; remove it")
        return self


class Curriculum(Section):
    """Which tasks come how often, by how often they have been solved.

    The weight of an environment is multiplied by ``max(floor, 4 p (1 - p))``, where ``p`` is its
    share of episodes solved of late: what is always or never solved teaches little.
    """

    window: PositiveInt = 256
    """How many of the last episodes of an environment count."""
    begin_after: PositiveInt = 32
    """Until so many have ended, the environment has its full weight."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Least factor: no environment is forgotten."""
    solved_at: Number | None = None
    """An episode is solved when its reward is at least this; none: where it says ``success``."""
    retire_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """A task whose groups were solved at this rate or more the last time they were seen is passed
    over once in its next epoch; none: never."""


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """What there is besides the policy and its algorithm."""

    lora: LoRA | None = None
    """None: all of the policy is trained."""
    warms_whole: bool = False
    """Whether adapters begin with RL, on what a warm start has made of the whole policy."""
    critic: Critic | None = None
    """How extra modules are built and taught."""
    reference: Reference | None = None
    """None: the weights RL began with."""
    has_teacher: bool = False
    """Whether samples come with a teacher's logprobs."""
    shapings: Mapping[str, Shaping] = field(default_factory=dict)
    """By the name of the environment: what its rewards become."""


ALONE = AuxiliaryModels()
"""Nothing."""


def check_auxiliary_models(
    beside: AuxiliaryModels, requires: frozenset[str], modules: frozenset[str]
) -> None:
    """Refuse what does not go together with the algorithm, now that its options are known.

    Args:
        beside: What the run has.
        requires: The signals that the algorithm asks for.
        modules: The names of its extra modules.

    Raises:
        ConfigError: Saying what to add or remove.
    """
    if modules and beside.critic is None:
        raise ConfigError(
            f"the algorithm trains {', '.join(sorted(modules))} beside the policy: add critic to "
            "the config, such as critic: {backbone: shared}"
        )
    for section, given, is_used in (
        ("critic", beside.critic is not None, bool(modules)),
        ("reference", beside.reference is not None, "ref_logprobs" in requires),
        ("teacher", beside.has_teacher, "teacher_logprobs" in requires),
    ):
        if given and not is_used:
            raise ConfigError(
                f"{section}: has no effect, for the algorithm asks for nothing of it with these "
                "options; remove it, or set the option that does (such as kl_coef)"
            )
