"""Sections of a run config that say how a run is measured, what it keeps or undoes, when it ends.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: imports torch, or a plugin's code; or judges a batch
(:mod:`rollart_core.training.guard` does).
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
"""What a validation measures."""

VALIDATION_SPLITS = ("validation", "val")
"""Names of splits that an environment declares for validation."""


class StopWhen(Section):
    """Training ends by what was learned, as validations measure it."""

    metric: ValidationMetric
    """``validation/success`` or ``validation/score``."""
    value: Number | None = None
    """Training ends when ``metric`` is at least this in ``patience`` validations in a row; none:
    when ``patience`` validations in a row were not above the best one before them."""
    patience: PositiveInt = 2
    """Validations in a row."""


class Stop(Section):
    """When training ends: at the first that comes true."""

    batches: PositiveInt | None = None
    """Weight publications: the budget that does not depend on the speed of the machine."""
    wall_s: Seconds | None = None
    """Seconds of RL training (set-up, warm start and the evaluations before and after it are not
    counted, validations are)."""
    when: StopWhen | None = None
    """A condition on validations, which needs ``evaluation.every_batches``; none: only the limits
    end the run."""

    @model_validator(mode="after")
    def _one_at_least(self) -> Stop:
        if self.batches is None and self.wall_s is None:
            limits = "stop needs batches or wall_s, or the run never ends"
            if self.when is not None:
                limits += ": stop.when may never come true, and one of them is its upper limit"
            raise ValueError(limits)
        return self


class Evaluation(Section):
    """Held-out tasks: before and after training, and (validation) while it goes on."""

    split: Name = "test"
    """Tasks that are held out."""
    tasks: PositiveInt = 100
    """How many; always the same ones."""
    samples_per_task: PositiveInt = 1
    """Sampled episodes a task."""
    greedy: bool = True
    """Also report greedy decoding."""
    every_batches: PositiveInt | None = None
    """Weight publications between two validations; one more is at the beginning, and one at the
    end. None: there is no validation."""
    validation_tasks: PositiveInt = 64
    """Tasks of a validation, one sampled episode each; always the same ones. There are
    fewer where more than a fifth of the training tasks would be taken out for them."""
    validation_split: Name | None = None
    """The split they are of, which is neither trained on nor tested. None: the split that the
    environment calls ``validation`` or ``val``; where it has none, tasks are taken out of
    ``rollout.split`` by a hash of the task (of its product, or what else makes tasks alike), and
    neither training nor the warm start sees them."""


class Checkpoint(Section):
    """What is kept for ``--resume``, and which weights are the result."""

    every_batches: PositiveInt = 10
    """Weight publications between two checkpoints."""
    keep: PositiveInt = 2
    """How many of the newest are kept, besides the best."""
    keep_best: ValidationMetric | None = None
    """The trained model is that of the best validation by this metric (of equal ones the
    latest), and its checkpoint is kept; needs ``evaluation.every_batches``. None: the trained
    model is the last one."""


SWITCHES = ("on", "off")
"""What ``guard`` may be instead of a section."""

_Share = Annotated[float, Field(gt=0, lt=1)]


class GuardLimits(Section):
    """What a batch may show before the guard undoes it. ``null`` for a limit: that is not watched.

    Apart from ``not_finite``, nothing is judged before 16 batches. A limit that a running median or
    quantile widens takes it over the last 200 batches.
    """

    drop: _Share | None = 0.2
    """How far the mean of the last 2, 4 or 8 batches may fall below the best mean of 16: of
    success, or of reward as a share of its range (the larger of the best and the gain since the
    beginning)."""
    noise: Positive = 6.0
    """A fall also counts only when it is more than this many standard errors, as the batches before
    show them."""
    kl: Positive | None = 0.2
    """Most ``train/approx_kl``; 4 times the running 99% quantile where that is more."""
    ratio: Positive | None = 50.0
    """Most ``train/is_ratio_max``; 4 times the running 99% quantile where that is more. It counts
    when 2 of the last 8 batches are above."""
    grad_norm: Positive | None = 25.0
    """Most gradient norm before clipping, as a multiple of its running median; 4 times the running
    99% quantile where that is more. It counts when 2 of the last 8 batches are above."""
    entropy_low: _Share | None = 0.05
    """Least entropy, mean of 4 batches, as a share of its running median. This limit and those that
    follow are ignored while success or reward is at its best."""
    entropy_high: Positive | None = 8.0
    """Most entropy, mean of 4 batches, as a multiple of its running median, and 0.3 more than
    that median at least."""
    repeated: _Share | None = 0.5
    """Share of the text that did not repeat itself (``rollout/repeated_share``, running median) and
    does so now, mean of 4 batches."""
    length: Annotated[float, Field(gt=1, le=MOST)] | None = 3.0
    """By which factor the sampled tokens of a trajectory, mean of 8 batches, may leave their
    running median, up or down."""
    not_finite: PositiveInt | None = 2
    """So many batches in a row with an update that was not finite. Such an update is never applied;
    three in a row count without this limit too."""


class Guard(Section):
    """When training has gone wrong, go back to the last good checkpoint with a lower rate."""

    max_rollbacks: Count = 3
    """How often the run goes back. At the next trip it stops with its best weights, and fails."""
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The learning rate is multiplied by this each time."""
    watch: Literal["success", "reward"] | None = None
    """What must not fall: the mean success of a batch, or its mean reward; none: success where an
    environment says it, else reward. ``success`` is refused where no environment reports it."""
    window: PositiveInt = 8
    """Without validations, a checkpoint counts as good when so many batches after it passed."""
    limits: GuardLimits = GuardLimits()
    """What a batch may show."""


def guard_section(value: Any) -> Any:
    """Return what a config says of the guard as keys of the section; None: it is off.

    Raises:
        ValueError: When it is neither a switch nor a section.
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
