"""Sections of a run config that say what is trained beside the policy, and what rewards become.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: imports torch, or a plugin's code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollart_core.config.base import (
    Count,
    LearningRate,
    Number,
    PluginRef,
    Positive,
    PositiveInt,
    Processes,
    Section,
)


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
