"""The warm start: supervised steps on the oracle's demonstrations, until the policy is worth RL.

Takes: demonstrations, the trainer, and a check that says how often sampled episodes succeed. Gives:
how far it came. Never: uses tasks of the training or test split for its checks (they have a split
of their own), or touches what RL starts from but the weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart_core.config.run import WarmStart
from rollart_core.types import Sample

CHECK_FROM_SHARE = 0.3
"""Checks begin when the loss suggests this share of the success that is asked for."""
CHECK_ANYWAY = 20
"""Of so many checks that are due, one takes place however high the loss is: an expert that chooses
at random among ways that are as good has a loss that stays."""
LOSS_MEMORY = 0.8
"""Decay of the running mean of the loss."""


class SupervisedTrainer(Protocol):
    """The trainer, as the warm start sees it."""

    async def supervise(self, samples: list[Sample], lr: float) -> Mapping[str, float]:
        """Take one supervised step."""


@dataclass(frozen=True, slots=True)
class WarmStartDependencies:
    """What the warm start works with."""

    demonstrations: Callable[[int], Awaitable[list[Sample]]]
    trainer: SupervisedTrainer
    check: Callable[[int], Awaitable[float]]
    """Train step -> sampled success of the present weights on the check split."""
    progress: Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """How far it came."""

    train_steps: int
    success: float
    """At the last check; NaN when there was none."""
    reached: bool
    wall_s: float


async def warm_start(config: WarmStart, parts: WarmStartDependencies) -> WarmStartResult:
    """Train until sampled success reaches ``until_success``, or steps or time are used up."""
    began = time.perf_counter()
    success, loss, step = math.nan, math.nan, 0
    upcoming = asyncio.ensure_future(parts.demonstrations(config.batch_size))
    try:
        for step in range(1, config.max_train_steps + 1):
            samples = await upcoming
            upcoming = asyncio.ensure_future(parts.demonstrations(config.batch_size))
            metrics = await parts.trainer.supervise(samples, _lr(config, step))
            loss = _running(loss, metrics["loss"])
            wall_s = time.perf_counter() - began
            due = step % config.check_every == 0
            anyway = step % (CHECK_ANYWAY * config.check_every) == 0
            if anyway or (due and _promising(loss, samples, config.until_success)):
                success = await parts.check(step)
            parts.progress({"train_step": step, "loss": loss, "success": success, "wall_s": wall_s})
            if success >= config.until_success or wall_s > (config.max_wall_s or math.inf):
                break
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
    return WarmStartResult(
        train_steps=step,
        success=success,
        reached=success >= config.until_success,
        wall_s=time.perf_counter() - began,
    )


def _promising(loss: float, samples: Sequence[Sample], wanted: float) -> bool:
    """Say whether a check can succeed: an episode is sampled right with about exp(-loss tokens).

    Of each sample by itself: beside an environment of long answers, one of short ones is learned
    long before the mean of the tokens says so.
    """
    chances = [math.exp(-loss * sample.num_loss_tokens) for sample in samples]
    return sum(chances) / len(chances) >= CHECK_FROM_SHARE * wanted


def _running(mean: float, value: float) -> float:
    return value if math.isnan(mean) else LOSS_MEMORY * mean + (1 - LOSS_MEMORY) * value


def _lr(config: WarmStart, step: int) -> float:
    """Return the learning rate of a step: a short linear ramp, then constant."""
    return config.lr * min(1.0, step / config.warmup_train_steps)
