"""What an evaluation plays: which columns, and how many tasks of each environment, how often.

Takes: a resolved run, or a suite. Gives: an :class:`EvalPlan`, kept in the evaluation's folder so
that it can go on after a kill. Never: plays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollart_core.config.resolve import ResolvedRun
from rollart_core.errors import ConfigError
from rollart_core.evals.suite import Suite
from rollart_core.rollout.baseline import BASELINES
from rollart_core.scheduling.task_mix import shares
from rollart_core.store.run_dir import write_json

FILE = "plan.json"
MODEL, GREEDY = "model", "greedy"
_SAMPLED = (MODEL, "random")
"""Columns whose players draw, so that several attempts at a task differ by more than the task."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of one environment is played."""

    tasks: int
    attempts: int
    """At each task, by players that draw; others play it once."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What one evaluation plays."""

    columns: tuple[str, ...]
    """Baselines, ``model`` (sampled) and ``greedy``."""
    quotas: Mapping[str, Quota]
    """By the name of the environment."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Environments of the suite that cannot be played here, and why."""

    @property
    def has_model(self) -> bool:
        """True when a model plays, and not baselines alone."""
        return MODEL in self.columns

    def attempts(self, column: str, env: str) -> int:
        """Return how often a column plays each task of an environment."""
        return self.quotas[env].attempts if column in _SAMPLED else 1

    def write(self, folder: Path) -> None:
        """Keep it."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> EvalPlan:
        """Return the plan that a folder keeps.

        Raises:
            ConfigError: When it is no folder of an evaluation.
        """
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(f"{folder}: that is no folder of an evaluation (it has no {FILE})")
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            quotas = {name: Quota(**quota) for name, quota in kept["quotas"].items()}
            return cls(tuple(kept["columns"]), quotas, kept["left_out"])
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{path}: is not of this release: {e}") from None


def record_of(run: ResolvedRun, plan: EvalPlan) -> dict[str, Any]:
    """Return the config that an evaluation keeps: without a model where none plays."""
    idle = () if plan.has_model else ("model", "engine")
    return {key: value for key, value in run.as_dict().items() if key not in idle}


def columns_of(baselines: Sequence[str], *, has_model: bool, greedy: bool) -> tuple[str, ...]:
    """Return the columns to play, in the order of the table.

    Raises:
        ConfigError: When a baseline is unknown, or there is nobody to play.
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ConfigError(f"--baseline {unknown[0]}: must be one of {', '.join(BASELINES)}")
    models = ((MODEL, GREEDY) if greedy else (MODEL,)) if has_model else ()
    return (*(name for name in BASELINES if name in baselines), *models)


def plan_of_run(run: ResolvedRun, columns: tuple[str, ...]) -> EvalPlan:
    """Return the plan of a run config: ``evaluation.tasks``, shared out by weight."""
    config = run.config.evaluation
    counts = shares([env.weight for env in run.envs], config.tasks)
    quotas = {
        env.name: Quota(n, config.samples_per_task) for env, n in zip(run.envs, counts, strict=True)
    }
    return EvalPlan(columns, quotas)


def plan_of_suite(suite: Suite, columns: tuple[str, ...], left_out: Mapping[str, str]) -> EvalPlan:
    """Return the plan of a suite, without the environments that are left out."""
    quotas = {
        name: Quota(env.tasks or suite.tasks, env.attempts or suite.attempts)
        for env, name in zip(suite.envs, suite.names, strict=True)
        if name not in left_out
    }
    return EvalPlan(columns, quotas, dict(left_out))
