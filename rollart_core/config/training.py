"""Sections of a run config for the trainer, auxiliary models, rewards and the curriculum.

Takes: plain mappings. Gives: frozen sections, which :mod:`rollart_core.config.run` uses, and
:class:`AuxiliaryModels`, which every trainer rank receives with them. Never: imports torch or a
plugin's code.
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
    """Schedule of the learning rate after its warm-up."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the schedule: ``constant``, ``linear``, ``cosine`` (arXiv:1608.03983, equation 5) or
    ``wsd``, which is constant and falls linearly at the end (arXiv:2404.06395)."""
    over: Literal["train_steps", "stop"] = "train_steps"
    """What determines the length of the schedule. ``train_steps``: a number of updates. ``stop``:
    the run, with the used share of ``stop`` (batches or time, whichever is larger) as the
    position."""
    num_train_steps: PositiveInt | None = None
    """Number of updates at which the schedule ends, including the warm-up (``over: train_steps``).
    If not set, it is ``stop.batches`` times ``updates_per_batch``."""
    min_ratio: Fraction = 0.1
    """Learning rate at the end of the schedule and after it, as a share of ``lr``."""
    decay_share: Share = 0.1
    """Last share of the schedule, in which the rate falls (``kind: wsd``)."""

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
    """Clip gradients only at ``trainer.grad_clip``."""

    case: ClassVar[str] = "trainer.clip.kind: norm"

    kind: Literal["norm"] = "norm"
    """Selects a fixed bound."""


class QuantileClip(Section):
    """AutoClip (arXiv:2007.14469): clip at a quantile of the previous norms."""

    case: ClassVar[str] = "trainer.clip.kind: quantile"

    kind: Literal["quantile"] = "quantile"
    """Selects a quantile as the bound."""
    quantile: Share = 0.9
    """Quantile of the last norms, including the current one. Decrease it to clip more."""
    window: PositiveInt = 256
    """Number of last norms that count. The paper uses all of them."""
    warmup_updates: PositiveInt = 20
    """Number of first updates that only ``trainer.grad_clip`` bounds."""
    skip_above: SkipAbove | None = None
    """Skip an update whose norm is more than this many times the threshold. If not set, it is
    clipped."""

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
    """Selects a z-score as the bound."""
    z_threshold: Positive = 2.5
    """Number of standard deviations above the mean from which norms are clipped. Decrease it to
    clip more."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.97
    """Decay of the moving mean and variance of the norms."""
    warmup_updates: Annotated[int, Field(ge=2, le=MOST)] = 25
    """Number of first updates that only ``trainer.grad_clip`` bounds. The moving mean and variance
    start with the values of these updates."""
    skip_above: SkipAbove | None = None
    """Skip an update whose norm is more than this many times the threshold. If not set, it is
    clipped."""


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
    """Learning rate of AdamW. Decrease it if training is unstable."""
    warmup_train_steps: Count = 5
    """Number of train steps over which the learning rate rises to ``lr``."""
    schedule: Schedule = Schedule()
    """Schedule of the learning rate after the warm-up. A single word, such as ``cosine``, is its
    ``kind``."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment in AdamW."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of the second moment in AdamW."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Term added to the denominator in AdamW for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight decay of AdamW."""
    grad_clip: Positive = 1.0
    """Maximum norm of the gradient."""
    clip: Clip = NormClip()
    """Adaptive bound below ``grad_clip``, based on previous norms. ``kind`` is ``norm`` (no
    adaptive bound), ``quantile`` or ``zscore``; a single word is its ``kind``."""
    max_kl: Positive | None = None
    """Maximum KL divergence between the policies before and after an update. A larger update is
    undone and repeated with half the step, up to three times, and then skipped. If not set, it is
    not measured. It needs 12 more bytes per trained parameter."""
    max_logprob_mismatch: Positive = 0.1
    """Largest mean difference between the trainer's and the engine's logprobs of up to 64 answers
    before the first update, in nats per token. A larger difference stops the run. Usual values are
    below 1e-4 in float32 and 0.01 to 0.05 in bfloat16."""
    updates_per_batch: PositiveInt = 1
    """Number of optimizer updates (train_steps) per batch of groups. One weight publication follows
    them."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Maximum number of tokens in one forward and backward pass. Decrease it to save memory."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """CPU kernels. ``native`` compiles CPU functions at first use with the machine's C compiler.
    ``auto`` does so if there is a compiler. ``torch`` uses PyTorch's own."""
    autocast: Literal["off", "bfloat16"] = "off"
    """Data type of matrix products."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and recompute the layer. This saves
    memory for about a third more computation. Shared prefixes are then computed for each sample."""
    collective_timeout_s: Seconds | None = None
    """Maximum seconds for a collective call between trainer ranks (``runtime.num_trainer_ranks``
    above 1). A longer call fails. Default: 600 s."""

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
            raise ValueError(f"must be one of {', '.join(_CLIPS)} or a section, got {value!r}")
        if (kind := given.get("kind", "norm")) not in _CLIPS:
            raise ValueError(f"there is no kind {kind!r}: use one of {', '.join(_CLIPS)}")
        return given


class Critic(Section):
    """The critic of an algorithm that has one (``ppo``)."""

    backbone: Literal["own", "shared", "detached"] = "own"
    """Source of the hidden states for the value head. ``own``: a second model that starts as a copy
    of the policy and is trained with the head (twice the memory). ``shared``: the policy, which is
    also trained to predict values. ``detached``: the policy, without gradients from the head."""
    lr: LearningRate = 1e-3
    """Learning rate of the critic's own AdamW. All other settings are those of ``trainer``."""
    warmup_train_steps: Count = 0
    """Number of first train steps that train only the critic and leave the policy unchanged."""


class LoRA(Section):
    """Train low-rank adapters (arXiv:2106.09685) and keep the model frozen."""

    rank: PositiveInt = 16
    """Rank of each adapter. A higher rank has more capacity and needs more memory."""
    alpha: Positive = 32.0
    """Numerator of the adapter's scale: its output is multiplied by ``alpha / rank``."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Matrices of every decoder layer that have an adapter, such as ``[q_proj, v_proj]``. If not
    set, all have one."""
    sync: Literal["merged", "adapter"] = "merged"
    """What engines receive. ``merged``: whole weights, with the adapters merged. ``adapter``: only
    the adapters, which the embedded engine merges into its own copy of the base, and which SGLang
    and vLLM load as LoRA adapters. This sends far less data."""

    @model_validator(mode="after")
    def _adapts_something(self) -> LoRA:
        if self.target_modules == ():
            raise ValueError("target_modules is empty; remove it to adapt all matrices")
        return self


class Reference(Section):
    """The model that a KL penalty compares the policy with."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or hub id of a model with the vocabulary of the policy."""


class Teacher(Section):
    """The model that a distillation algorithm (``opd``) learns from."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or hub id of a model with the vocabulary of the policy."""
    engine: PluginRef = PluginRef(id="embedded")
    """Inference engine that runs the teacher. It must be able to score given tokens."""
    num_engines: Processes = 1
    """Number of teacher engines. Trajectories are distributed in turn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the teacher's weights."""


class Overlong(Section):
    """Soft penalty on long episodes (DAPO, arXiv:2503.14476, section 3.4)."""

    max_tokens: PositiveInt
    """Number of sampled tokens from which an episode receives the whole ``penalty``."""
    buffer_tokens: PositiveInt
    """Number of tokens below ``max_tokens`` at which the penalty starts. It grows linearly."""
    penalty: Positive = 1.0
    """Maximum amount subtracted from the reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Overlong:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens ({self.buffer_tokens}) cannot be more than max_tokens "
                f"({self.max_tokens})"
            )
        return self


class Shaping(Section):
    """Changes to rewards before the algorithm receives them. Records keep the original rewards.

    The order is: ``overlong``, ``normalise``, ``scale``, ``clip``.
    """

    overlong: Overlong | None = None
    """Penalty on long episodes. If not set, there is none."""
    normalise: Literal["none", "running"] = "none"
    """``running`` subtracts the mean of all rewards of the same environment so far and divides by
    their standard deviation. Use it to give the rewards of several environments the same scale."""
    scale: Positive = 1.0
    """Factor that multiplies rewards."""
    clip: tuple[Number, Number] | None = None
    """Minimum and maximum reward. If not set, rewards are not clipped."""

    @model_validator(mode="after")
    def _does_something(self) -> Shaping:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip: {self.clip[0]:g} must be below {self.clip[1]:g}")
        fields = type(self).model_fields
        if all(getattr(self, name) == field.default for name, field in fields.items()):
            raise ValueError("shaping without any of its keys has no effect; remove it")
        return self


class Curriculum(Section):
    """Adapt how often tasks are drawn to how often they are solved.

    The weight of an environment is multiplied by ``max(floor, 4 p (1 - p))``, where ``p`` is the
    share of its recent episodes that were solved. Tasks that are always or never solved teach
    little.
    """

    window: PositiveInt = 256
    """Number of most recent episodes of an environment that count."""
    begin_after: PositiveInt = 32
    """Number of finished episodes before an environment's weight is adapted."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Minimum factor, so that every environment keeps some tasks."""
    solved_at: Number | None = None
    """Minimum reward of a solved episode. If not set, an episode is solved if the environment
    reports ``success``."""
    retire_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Skip a task once in its next epoch if its groups were solved at least at this rate when last
    seen. If not set, no task is skipped."""


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """The models and modules in addition to the policy."""

    lora: LoRA | None = None
    """None: the whole policy is trained."""
    warms_whole: bool = False
    """Whether a warm start trains the whole policy before RL trains adapters."""
    critic: Critic | None = None
    """How extra modules are built and trained."""
    reference: Reference | None = None
    """None: the weights at the start of RL."""
    has_teacher: bool = False
    """Whether samples include a teacher's logprobs."""
    shapings: Mapping[str, Shaping] = field(default_factory=dict)
    """Name of an environment -> the shaping of its rewards."""


ALONE = AuxiliaryModels()
"""No auxiliary models."""


def check_auxiliary_models(
    beside: AuxiliaryModels, requires: frozenset[str], modules: frozenset[str]
) -> None:
    """Reject sections that do not fit the algorithm and its options.

    Args:
        beside: The run's auxiliary models.
        requires: The signals that the algorithm requires.
        modules: The names of its extra modules.

    Raises:
        ConfigError: If a section is missing or has no effect; says what to add or remove.
    """
    if modules and beside.critic is None:
        raise ConfigError(
            f"the algorithm also trains {', '.join(sorted(modules))}: add critic to "
            "the config, such as critic: {backbone: shared}"
        )
    for section, given, is_used in (
        ("critic", beside.critic is not None, bool(modules)),
        ("reference", beside.reference is not None, "ref_logprobs" in requires),
        ("teacher", beside.has_teacher, "teacher_logprobs" in requires),
    ):
        if given and not is_used:
            raise ConfigError(
                f"{section}: has no effect, because the algorithm does not use it with these "
                "options; remove it, or set an option that uses it (such as kl_coef)"
            )
