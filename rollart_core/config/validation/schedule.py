"""What must hold between a learning rate schedule and the rest of a run config.

Takes: a RunConfig. Gives: problems; and the ``trainer`` section with the end of its schedule filled
in. Never: computes a learning rate (:mod:`rollart_core.training.optimizer` does).
"""

from __future__ import annotations

from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig, Trainer

_AT = ("trainer", "schedule")


def schedule_problems(config: RunConfig) -> list[Problem]:
    """Return why the schedule of a run cannot be followed."""
    trainer, stop = config.trainer, config.stop
    schedule = trainer.schedule
    if schedule.kind == "constant":
        return []
    if schedule.over == "stop":
        return _share_problems(config)
    end = schedule.num_train_steps
    if end is None and stop.batches is None:
        message = (
            f"{schedule.kind} has no end: set num_train_steps, or stop.batches, or over: stop to "
            "spread it over the run"
        )
        return [Problem(_AT, message)]
    if end is not None and end <= trainer.warmup_train_steps:
        message = (
            f"{end}: must be more than trainer.warmup_train_steps ({trainer.warmup_train_steps}), "
            "after which the learning rate falls"
        )
        return [Problem((*_AT, "num_train_steps"), message)]
    return []


def _share_problems(config: RunConfig) -> list[Problem]:
    stop = config.stop
    if stop.batches is None and stop.wall_s is None:
        message = "stop: it has no share to follow; set stop.batches or stop.wall_s"
        return [Problem((*_AT, "over"), message)]
    if config.deterministic and stop.wall_s is not None:
        message = (
            "stop: with stop.wall_s the learning rate depends on time, and deterministic: true "
            "forbids that; use stop.batches alone, or over: train_steps"
        )
        return [Problem((*_AT, "over"), message)]
    return []


def trainer_section(config: RunConfig) -> Trainer:
    """Return the ``trainer`` section; a schedule over updates gets its end from ``stop``."""
    trainer, batches = config.trainer, config.stop.batches
    schedule = trainer.schedule
    if schedule.kind == "constant" or schedule.over == "stop" or schedule.num_train_steps:
        return trainer
    assert batches is not None, "schedule_problems refuses a schedule without an end"
    end = {"num_train_steps": batches * trainer.updates_per_batch}
    return trainer.model_copy(update={"schedule": schedule.model_copy(update=end)})
