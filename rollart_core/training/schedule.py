"""Learning rate schedules: the factor of ``trainer.lr`` at each update.

    warm-up (linear, W updates)  *  decay at the place p in [0, 1] of the schedule

    linear   1 - (1 - m) p
    cosine   m + (1 - m) (1 + cos(pi p)) / 2             arXiv:1608.03983, equation 5, one period
    wsd      1 until p = 1 - d, then linear down to m    arXiv:2404.06395

with m ``min_ratio`` and d ``decay_share``. Over updates p is ``(s - W) / (N - W)``, s the updates
taken so far and N ``num_train_steps``; over ``stop`` it is the share of ``stop`` that is used.

Takes: the section, the updates taken, the used share. Gives: a factor. Never: keeps anything, so
that a run that goes on from a checkpoint has the same learning rates.
"""

from __future__ import annotations

import math

from rollart_core.config.trainer import Schedule


def lr_factor(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return what ``trainer.lr`` is multiplied by at the next update.

    Args:
        schedule: The section; over updates, with ``num_train_steps`` known.
        warmup_train_steps: W.
        train_step: Updates taken so far.
        progress: The used share of ``stop``, where the schedule is over it.

    Raises:
        ValueError: When the schedule needs what was not given.
    """
    warmup = min(1.0, (train_step + 1) / max(1, warmup_train_steps))
    if schedule.kind == "constant":
        return warmup
    return warmup * _decay(schedule, _place(schedule, warmup_train_steps, train_step, progress))


def _place(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return where in the schedule an update is: from 0 to 1."""
    if schedule.over == "stop":
        if progress is None:
            raise ValueError("a schedule over stop needs the used share of it with every batch")
        return min(1.0, max(0.0, progress))
    if schedule.num_train_steps is None:
        raise ValueError("a schedule over train_steps needs num_train_steps")
    length = max(1, schedule.num_train_steps - warmup_train_steps)
    return min(1.0, max(0.0, (train_step - warmup_train_steps) / length))


def _decay(schedule: Schedule, place: float) -> float:
    least = schedule.min_ratio
    if schedule.kind == "cosine":
        return least + (1 - least) * (1 + math.cos(math.pi * place)) / 2
    share = 1.0 if schedule.kind == "linear" else schedule.decay_share
    fallen = max(0.0, (place - (1 - share)) / share)
    return 1 - (1 - least) * fallen
