"""Shared parts of the benchmarks that learn on ``toy/Bandit-v1``: a starting policy, short runs.

Takes: options, config overrides. Gives: a folder with a tiny model that knows the form of the game
but not which arm pays; the report and the curve of a run from it. Never: keeps run directories,
unless a folder for them is given.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rollart_bench.options import Options
from rollart_bench.rows import echo
from rollart_bench.sides import run_mapping
from rollart_core.runtime.report import RunReport
from rollart_core.store.estimates import t_95
from rollart_core.store.journal_reader import JournalReader

ENV = "toy/Bandit-v1"
MODEL: Mapping[str, object] = {
    "kind": "new",
    "num_layers": 1,
    "width": 64,
    "num_heads": 1,
    "ffn_width": 128,
    "vocab_size": 320,
}
GROUPS_PER_BATCH, GROUP_SIZE = 8, 8
SHORT_TRAIN_STEPS = 30
SHORT_EVALUATION: Mapping[str, object] = {"split": "test", "tasks": 32, "greedy": False}


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    report: RunReport
    success: tuple[float, ...]
    """Per batch, the share of the trained trajectories that succeeded."""
    cpu_s: float
    """CPU seconds of all processes of the run, including start-up and evaluation."""

    @property
    def before(self) -> float:
        """Sampled success on held-out tasks before RL."""
        return self.report.before.success.mean if self.report.before else math.nan

    @property
    def after(self) -> float:
        """The same after RL; NaN if the run stopped early."""
        return self.report.after.success.mean if self.report.after else math.nan


@contextmanager
def runs_folder(asked: Options) -> Iterator[Path]:
    """Return the folder of the option ``runs_dir``, or a temporary folder."""
    if "runs_dir" in asked:
        yield asked.path("runs_dir", "")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def beginner(runs_dir: Path, env: Mapping[str, object], *, short: bool = False) -> str:
    """Train a model on the form of the game only, and return its folder.

    Each demonstration pays another arm, so the model only learns to name an arm.

    Args:
        runs_dir: The parent of its run directory.
        env: Options of the environment.
        short: Whether to train less.
    """
    train_steps = SHORT_TRAIN_STEPS if short else 70
    return _taught("beginner", runs_dir, {**env, "secret": None}, train_steps=train_steps)


def expert(runs_dir: Path, env: Mapping[str, object]) -> str:
    """Train a model on which arm pays, and return its folder."""
    return _taught("expert", runs_dir, env, train_steps=150)


def short_run() -> dict[str, object]:
    """Return the model section of a short run: a new model that is taught in the same run.

    So, unlike :func:`beginner`'s, the policy partly knows which arm pays before RL. One run does
    what otherwise takes two.
    """
    return {
        "model": MODEL,
        "warm_start": _warm_start(SHORT_TRAIN_STEPS),
        "evaluation": SHORT_EVALUATION,
    }


def _warm_start(train_steps: int) -> dict[str, object]:
    return {
        "until_success": 1.0,
        "max_train_steps": train_steps,
        "check_every": train_steps + 1,
        "lr": 2e-3,
        "batch_size": 32,
    }


def _taught(name: str, runs_dir: Path, env: Mapping[str, object], *, train_steps: int) -> str:
    echo(f"a model is taught: {name}")
    report = run_mapping(
        run_config(name, runs_dir, env)
        | {
            "model": MODEL,
            "warm_start": _warm_start(train_steps),
            # A run trains at least one batch. This one has no effect.
            "algorithm": {"id": "grpo", "proximal": "inference"},
            "trainer": {"lr": 1e-12},
            "evaluation": {"split": "test", "tasks": 1, "greedy": False},
            "stop": {"batches": 1},
        }
    )
    return str(Path(report.run_dir) / "model-trained")


def run_config(name: str, runs_dir: Path, env: Mapping[str, object]) -> dict[str, object]:
    """Return the config that all runs share, without ``model`` and ``stop``."""
    return {
        "name": name,
        "runs_dir": str(runs_dir),
        "mode": "sync",
        "runtime": {"env_processes": 0},
        "env": {"id": ENV, **env},
        "trackers": [],
        "rollout": {
            "groups_per_batch": GROUPS_PER_BATCH,
            "group_size": GROUP_SIZE,
            "max_new_tokens": 3,
            "max_context_tokens": 96,
        },
        "trainer": {"lr": 2e-3, "beta2": 0.95, "warmup_train_steps": 3},
        "evaluation": {"split": "test", "tasks": 256, "greedy": False},
        "checkpoint": {"every_batches": 1_000_000},
    }


def learn(config: Mapping[str, object]) -> Learned:
    """Run a config and read its results."""
    began = _cpu_s()
    report = run_mapping(config)
    return Learned(report, success_of(Path(report.run_dir)), _cpu_s() - began)


def success_of(run_dir: Path) -> tuple[float, ...]:
    """Return the success of each batch, in training order."""
    with JournalReader(run_dir) as journal:
        found = {m.policy_version: m.value for m in journal.metrics("rollout/success_mean")}
    return tuple(value for _, value in sorted(found.items()) if value is not None)


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that is merged with another, key by key within sections."""
    over = dict(config)
    for key, value in changes.items():
        old = over.get(key)
        over[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return over


def noise(one: list[float], other: list[float]) -> float:
    """Return how far the means of two sets of equal size may differ by chance, with 95% confidence.

    Half the interval of Student's two-sample t: ``t sqrt((s1^2 + s2^2) / n)``; NaN for one seed.
    """
    n = len(one)
    if n < 2:
        return math.nan
    return t_95(2 * n - 2) * math.sqrt((stdev(one) ** 2 + stdev(other) ** 2) / n)


def mean(values: list[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    return fmean(values) if values else math.nan


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
