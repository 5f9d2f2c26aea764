"""Metrics of runs that were never run: healthy ones, noisy as real ones are, and ten faults.

Success of a batch is drawn by group, from tasks of different difficulty, about a learning curve
with slow swings; norms and KL have heavy tails. Each fault changes a healthy run in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollart_core.scheduling.events import StopRun
from rollart_core.store.journal import Journal
from rollart_view.diagnosis.history import History, Series

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Curve:
    """What a run is like."""

    num_batches: int = 300
    start: float = 0.2
    end: float = 0.85
    rise: float = 0.35
    """Share of the run after which half of the gain is made."""
    groups: int = 8
    size: int = 8
    tokens: float = 120.0
    tokens_factor: float = 0.9
    """Length at the end, over that at the beginning."""
    mode: str = "async"
    rounding: float = 2e-3
    """Difference of logprobs of fresh tokens."""


@dataclass
class Run:
    """Metrics by name; validations stand at versions of their own."""

    curve: Curve
    rng: np.random.Generator
    metrics: dict[str, Array]
    validation: dict[int, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, object]:
        """Of the run."""
        rollout = {"groups_per_batch": self.curve.groups, "group_size": self.curve.size}
        return {"mode": self.curve.mode, "max_staleness": 1, "rollout": rollout}

    def set_success(self, share: Array, spread: float = 1.5) -> None:
        """Draw success, and the metrics that depend on it, for an expected share of each batch."""
        c, rng = self.curve, self.rng
        logit = np.log(share / (1 - share))[:, None] + rng.normal(0, spread, (len(share), c.groups))
        solved = rng.binomial(c.size, 1 / (1 + np.exp(-logit)))
        equal = ((solved == 0) | (solved == c.size)).sum(1)
        self.metrics["rollout/success_mean"] = success = solved.mean(1) / c.size
        self.metrics["rollout/score_mean"] = score = success + (1 - success) * rng.uniform(
            0.2, 0.4, len(share)
        )
        self.metrics["reward/success"] = 0.5 * success
        self.metrics["reward/return"] = 0.5 * score
        self.metrics["rollout/reward_mean"] = 0.5 * success + 0.5 * score
        self.metrics["train/zero_advantage_groups"] = equal.astype(float)
        self.metrics["train/batch_groups"] = np.full(len(share), float(c.groups))

    def set_validation(self, share: Array, every: int = 10) -> None:
        """Score 64 tasks every so many batches."""
        n = range(every, len(share) + 1, every)
        self.validation = {i: self.rng.binomial(64, share[i - 1]) / 64 for i in n}

    def history(self) -> History:
        """Return what a diagnosis looks at."""
        versions = np.arange(self.curve.num_batches)
        series = {name: Series(versions, values) for name, values in self.metrics.items()}
        at, values = np.array(list(self.validation)), np.array(list(self.validation.values()))
        return History(versions, {**series, "validation/success": Series(at, values)}, self.config)

    def write(self, run_dir: Path) -> Path:
        """Write its journal, as a run does."""
        run_dir.mkdir(parents=True, exist_ok=True)
        journal = Journal(run_dir, self.config)
        for n in range(self.curve.num_batches):
            journal.metrics(n + 1, n, {name: v[n] for name, v in self.metrics.items()})
            if n + 1 in self.validation:
                journal.metrics(n + 1, n + 1, {"validation/success": self.validation[n + 1]})
        journal.decided(StopRun("stop.batches: all are trained", "done"))
        journal.close()
        return run_dir


def wandering(rng: np.random.Generator, size: int, std: float, memory: float = 0.8) -> Array:
    """Return noise in which neighbours resemble one another."""
    steps, out = rng.normal(0, std * np.sqrt(1 - memory**2), size), np.zeros(size)
    for n in range(1, size):
        out[n] = memory * out[n - 1] + steps[n]
    return out


def shares(curve: Curve, rng: np.random.Generator) -> Array:
    """Return the expected success of each batch: a learning curve with slow swings."""
    x = np.arange(curve.num_batches) / curve.num_batches
    s = 1 / (1 + np.exp(-(x - curve.rise) * 10))
    s = (s - s[0]) / (1 / (1 + np.exp(-(1 - curve.rise) * 10)) - s[0])
    share = curve.start + (curve.end - curve.start) * s
    logit = np.log(share / (1 - share)) + wandering(rng, len(share), 0.15)
    return 1 / (1 + np.exp(-logit))


def healthy(seed: int, curve: Curve | None = None) -> Run:
    """Return a run in which nothing is wrong."""
    c, rng = curve or Curve(), np.random.default_rng(seed)
    n = c.num_batches

    def heavy(level: float, spread: float) -> Array:
        return level * np.exp(rng.normal(0, spread, n) + (rng.random(n) < 0.01) * 1.5)

    run = Run(c, rng, {})
    share = shares(c, rng)
    run.set_success(share)
    run.set_validation(np.clip(share - 0.02, 0.01, 0.99))
    is_fresh = rng.random(n) < (0.5 if c.mode == "async" else 1.0)
    tokens = c.tokens * c.tokens_factor ** np.linspace(0, 1, n)
    run.metrics |= {
        "train/grad_norm": heavy(0.4, 0.4),
        "train/approx_kl": heavy(5e-4, 0.8),
        "train/is_ratio_max": 1 + heavy(0.2, 0.6),
        "train/entropy": heavy(0.3, 0.1) * np.linspace(1, 0.5, n),
        "train/clip_fraction": np.minimum(1, heavy(2e-3, 0.7)),
        "train/effective_sample_size": 1 - np.minimum(0.4, heavy(0.02, 0.6)),
        "train/logprob_diff_fresh_mean": np.where(is_fresh, heavy(c.rounding, 0.3), 0.0),
        "rollout/loss_tokens_mean": tokens * np.exp(wandering(rng, n, 0.05)),
        "rollout/truncated_share": rng.binomial(c.groups * c.size, 0.03, n) / c.groups / c.size,
        "staleness/mean": np.full(n, 0.0) if c.mode == "sync" else rng.uniform(0.7, 1, n),
        "time/train_s": heavy(0.5, 0.3),
        "time/trainer_waited_s": heavy(1.0, 0.6),
    }
    return run


HEALTHY: Mapping[str, Curve] = {
    "usual": Curve(),
    "solved": Curve(num_batches=600, end=0.98, rise=0.2),
    "slow": Curve(num_batches=200, start=0.1, end=0.5, rise=0.8),
    "small batches": Curve(num_batches=250, groups=4, size=4, rise=0.5),
    "longer answers, sync": Curve(tokens_factor=2.0, mode="sync", rise=0.6),
    "short": Curve(num_batches=40, end=0.5, rise=0.5),
}


def collapse(seed: int) -> Run:
    """From 201 on success falls to a quarter within five batches; 202 is the largest update."""
    run = healthy(seed, Curve(rise=0.2))
    share = shares(run.curve, run.rng)
    share[200:] *= np.maximum(0.25, 1 - np.arange(100) / 5)
    run.set_success(share)
    run.set_validation(share)
    run.metrics["train/grad_norm"][201:203] = (8.0, 30.0)
    return run


def vanishing_signal(seed: int) -> Run:
    """Half of the tasks are always solved, the other half never."""
    run = healthy(seed)
    run.set_success(np.full(300, 0.5), spread=40.0)
    run.set_validation(np.full(300, 0.5))
    return run


def staleness(seed: int) -> Run:
    """From 120 on, samples are six versions old, and weights of importance degenerate."""
    run = healthy(seed)
    late = np.arange(300) >= 120
    run.metrics["staleness/mean"][late] += 5
    run.metrics["train/effective_sample_size"][late] *= 0.3
    run.metrics["train/clip_fraction"][late] = run.rng.uniform(0.2, 0.5, late.sum())
    return run


def mismatch(seed: int) -> Run:
    """From 150 on, the engine computes something else than the trainer."""
    run = healthy(seed)
    run.metrics["train/logprob_diff_fresh_mean"][150:] *= 80
    return run


def length_drift(seed: int) -> Run:
    """Success stays where it is from 120 on; answers become three times as long."""
    run = healthy(seed, Curve(end=0.97, rise=0.1))
    grow = np.clip((np.arange(300) - 120) / 180, 0, 1)
    run.metrics["rollout/loss_tokens_mean"] *= 3**grow
    run.metrics["rollout/truncated_share"] += 0.3 * grow * run.rng.uniform(0.8, 1.2, 300)
    return run


def reward_hacking(seed: int) -> Run:
    """From 120 on, a component of the reward rises while success falls."""
    run = healthy(seed, Curve(rise=0.2))
    share = shares(run.curve, run.rng)
    fade = np.clip((np.arange(300) - 120) / 180, 0, 1)
    run.set_success(share * (1 - 0.6 * fade))
    style = 0.2 + 1.0 * fade + run.rng.normal(0, 0.03, 300)
    run.metrics["reward/style"] = style
    run.metrics["rollout/reward_mean"] += style
    run.set_validation(share * (1 - 0.6 * fade))
    return run


def overfitting(seed: int) -> Run:
    """Training tasks are solved more and more; validation falls from 120 on."""
    run = healthy(seed, Curve(end=0.97))
    share = shares(run.curve, run.rng)
    fade = np.clip((np.arange(300) - 120) / 180, 0, 1)
    run.set_validation(np.minimum(share, 0.65) - 0.2 * fade)
    return run


def plateau(seed: int) -> Run:
    """Success stays at 0.6 from the first third on."""
    return healthy(seed, Curve(num_batches=600, start=0.2, end=0.6, rise=0.1))


def starved_trainer(seed: int) -> Run:
    """The trainer waits ten times as long as it trains."""
    run = healthy(seed)
    run.metrics["time/trainer_waited_s"] *= 5
    return run


def starved_rollouts(seed: int) -> Run:
    """The trainer never waits, and takes long."""
    run = healthy(seed)
    run.metrics["time/trainer_waited_s"] *= 0.005
    return run


FAULTS: Mapping[str, Callable[[int], Run]] = {
    f.__name__: f
    for f in (
        collapse,
        vanishing_signal,
        staleness,
        mismatch,
        length_drift,
        reward_hacking,
        overfitting,
        plateau,
        starved_trainer,
        starved_rollouts,
    )
}
