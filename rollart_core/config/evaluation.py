"""Sections of a run config that say how a run is measured, what it keeps, and when it ends.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: imports torch, or a plugin's code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rollart_core.config.base import Name, Number, PositiveInt, Seconds, Section

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
