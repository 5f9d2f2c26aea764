"""Sections of a run config for evaluation, checkpoints, the guard and stopping.

Takes: plain mappings. Gives: frozen sections, which :mod:`rollart_core.config.run` uses. Never:
imports torch or a plugin's code, or judges a batch (:mod:`rollart_core.training.guard` does).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart_core.config.base import (
    MOST,
    Count,
    Name,
    Number,
    Positive,
    PositiveInt,
    Seconds,
    Section,
)

ValidationMetric = Literal["validation/success", "validation/score"]
"""Metrics that a validation measures."""

VALIDATION_SPLITS = ("validation", "val")
"""Names of splits that an environment declares for validation."""


class StopWhen(Section):
    """End training when a validation metric reaches a value or stops improving."""

    metric: ValidationMetric
    """Metric to watch: ``validation/success`` or ``validation/score``."""
    value: Number | None = None
    """Training ends when ``metric`` is at least this value in ``patience`` consecutive validations.
    If not set, training ends when ``patience`` consecutive validations do not exceed the best
    earlier one."""
    patience: PositiveInt = 2
    """Number of consecutive validations that must meet the condition. Increase it if validations
    are noisy."""


class Stop(Section):
    """When training ends: the first limit or condition that is met ends it."""

    batches: PositiveInt | None = None
    """Maximum number of weight publications. This limit does not depend on the speed of the
    machine."""
    wall_s: Seconds | None = None
    """Maximum seconds of RL training. Validations are included. Set-up, warm start, and the
    evaluations before and after training are not."""
    when: StopWhen | None = None
    """A condition on validations. It needs ``evaluation.every_batches``. If not set, only the
    limits end the run."""

    @model_validator(mode="after")
    def _one_at_least(self) -> Stop:
        if self.batches is None and self.wall_s is None:
            limits = "stop needs batches or wall_s; without them the run never ends"
            if self.when is not None:
                limits += ": stop.when may never be met, so it needs one of them as an upper limit"
            raise ValueError(limits)
        return self


class Evaluation(Section):
    """Evaluation on held-out tasks before and after training, and validation during training."""

    split: Name = "test"
    """Split of the held-out tasks."""
    tasks: PositiveInt = 100
    """Number of held-out tasks. They are always the same tasks."""
    samples_per_task: PositiveInt = 1
    """Number of sampled episodes per task."""
    greedy: bool = True
    """Whether to report results of greedy decoding too."""
    every_batches: PositiveInt | None = None
    """Number of weight publications between two validations. Validations also run at the start and
    at the end. If not set, there are no validations."""
    validation_tasks: PositiveInt = 64
    """Number of validation tasks, with one sampled episode each. They are always the same tasks.
    The number is smaller if these tasks would be more than a fifth of the training tasks."""
    validation_split: Name | None = None
    """Split of the validation tasks, which is used neither for training nor for testing. If not
    set, the environment's split ``validation`` or ``val`` is used. If it has neither, tasks are
    held out of ``rollout.split`` by a hash of the task, or of its cluster of similar tasks.
    Training and the warm start do not use them."""


class Checkpoint(Section):
    """Which checkpoints are kept for ``--resume``, and which weights are the result."""

    every_batches: PositiveInt = 10
    """Number of weight publications between two checkpoints. Decrease it to lose less work after a
    crash."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    keep_best: ValidationMetric | None = None
    """Use the weights of the best validation by this metric as the trained model, and keep their
    checkpoint. Of equal validations, the latest counts. It needs ``evaluation.every_batches``. If
    not set, the last weights are the trained model."""


SWITCHES = ("on", "off")
"""Values that ``guard`` may have instead of a section."""

_Share = Annotated[float, Field(gt=0, lt=1)]


class GuardLimits(Section):
    """Limits on a batch: the guard undoes batches that exceed them. ``null`` disables a limit.

    Apart from ``not_finite``, no limit applies before batch 16. Running medians and quantiles cover
    the last 200 batches.
    """

    drop: _Share | None = 0.2
    """Maximum fall of the mean over the last 2, 4 or 8 batches below the best mean over 16 batches.
    For success, it is an absolute difference. For reward, it is a share of the best mean or of the
    gain since the start, whichever is larger."""
    noise: Positive = 6.0
    """A fall counts only if it is larger than this many standard errors, estimated from earlier
    batches."""
    kl: Positive | None = 0.2
    """Maximum ``train/approx_kl``, or 4 times its running 99% quantile if that is larger."""
    ratio: Positive | None = 50.0
    """Maximum ``train/is_ratio_max``, or 4 times its running 99% quantile if that is larger. The
    guard trips if 2 of the last 8 batches exceed it."""
    grad_norm: Positive | None = 25.0
    """Maximum gradient norm before clipping, as a multiple of its running median, or 4 times the
    running 99% quantile if that is larger. The guard trips if 2 of the last 8 batches exceed it."""
    entropy_low: _Share | None = 0.05
    """Minimum entropy (mean of 4 batches) as a share of its running median. This limit and the
    following ones are ignored while success or reward is at its best."""
    entropy_high: Positive | None = 8.0
    """Maximum entropy (mean of 4 batches) as a multiple of its running median. The limit is at
    least that median plus 0.3."""
    repeated: _Share | None = 0.5
    """Maximum rise of the share of repeated text (``rollout/repeated_share``, mean of 4 batches)
    above its running median, as a share of the text that did not repeat."""
    length: Annotated[float, Field(gt=1, le=MOST)] | None = 3.0
    """Maximum factor by which the sampled tokens per trajectory (mean of 8 batches) may deviate
    from their running median, up or down."""
    not_finite: PositiveInt | None = 2
    """Number of consecutive batches with a non-finite update that trip the guard. Such an update is
    never applied. Three in a row trip it even without this limit."""


class Guard(Section):
    """When training goes wrong, return to the last good checkpoint with a lower learning rate."""

    max_rollbacks: Count = 3
    """Maximum number of rollbacks. At the next trip the run stops with its best weights and
    fails."""
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor that multiplies the learning rate at each rollback."""
    watch: Literal["success", "reward"] | None = None
    """The mean that must not fall: success or reward of a batch. If not set, success is used if the
    environment reports it, otherwise reward. ``success`` is rejected if no environment reports
    it."""
    window: PositiveInt = 8
    """Number of later batches that must pass before a checkpoint counts as good, in a run without
    validations."""
    limits: GuardLimits = GuardLimits()
    """Limits on a batch. Change one only if the guard trips on healthy batches or misses bad
    ones."""


def guard_section(value: Any) -> Any:
    """Return the value of ``guard`` as keys of the section, or None if the guard is off.

    Raises:
        ValueError: If the value is neither a switch nor a section.
    """
    if value is None or value == "off":
        return None
    if value == "on":
        return {}
    if isinstance(value, dict | Guard):
        return value
    raise ValueError(
        f"must be on, off or a section of keys such as {{max_rollbacks: 5}}, got {value!r}"
    )
