"""The plan of an evaluation: its columns, and the tasks and attempts per environment.

A suite is a YAML file with several environments that are evaluated together:

    suite: small
    tasks: 100
    attempts: 4
    envs:
      - {id: toy/FrozenLake-v1, options: {hint: true}}
      - {id: webshop/WebShop-v1, tasks: 50}

Takes: a resolved run, or the mapping of a suite. Gives: an :class:`EvalPlan`, stored in the
evaluation's folder so that the evaluation can resume after a kill; a :class:`Suite`, its run
config, and the environments that this machine cannot run. Never: plays, or leaves out an
environment without ``if_sandbox``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from rollart_core.config.base import PositiveInt, Section, Seed
from rollart_core.config.load import apply_override
from rollart_core.config.problems import of_validation
from rollart_core.config.resolve import ResolvedRun
from rollart_core.config.run import AsyncRun
from rollart_core.contracts.env import ALL_TASKS
from rollart_core.errors import ConfigError, did_you_mean
from rollart_core.plugins import registry
from rollart_core.rollout.baseline import BASELINES
from rollart_core.scheduling.task_mix import shares
from rollart_core.store.run_dir import write_json

FILE = "plan.json"
MODEL, GREEDY = "model", "greedy"
_SAMPLED = (MODEL, "random")
"""Columns whose players sample, so that several attempts at one task differ."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The number of tasks and attempts in one environment."""

    tasks: int
    attempts: int
    """Attempts per task, for players that sample. Other players play each task once."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The plan of one evaluation."""

    columns: tuple[str, ...]
    """Baselines, ``model`` (sampled) and ``greedy``."""
    quotas: Mapping[str, Quota]
    """Name of the environment -> its quota."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Environments of the suite that cannot run on this machine -> the reason."""

    @property
    def has_model(self) -> bool:
        """True if a model plays, not only baselines."""
        return MODEL in self.columns

    def attempts(self, column: str, env: str) -> int:
        """Return the number of attempts of a column at each task of an environment."""
        return self.quotas[env].attempts if column in _SAMPLED else 1

    def write(self, folder: Path) -> None:
        """Write the plan to the folder."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> EvalPlan:
        """Return the plan in a folder.

        Raises:
            ConfigError: If the folder is not an evaluation.
        """
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(f"{folder}: not the folder of an evaluation (it has no {FILE})")
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            quotas = {name: Quota(**quota) for name, quota in kept["quotas"].items()}
            return cls(tuple(kept["columns"]), quotas, kept["left_out"])
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{path}: not from this release: {e}") from None


def record_of(run: ResolvedRun, plan: EvalPlan) -> dict[str, Any]:
    """Return the config that an evaluation stores. Without a model if none plays."""
    idle = () if plan.has_model else ("model", "engine")
    return {key: value for key, value in run.as_dict().items() if key not in idle}


def columns_of(baselines: Sequence[str], *, has_model: bool, greedy: bool) -> tuple[str, ...]:
    """Return the columns to play, in the order of the table.

    Raises:
        ConfigError: If a baseline is unknown, or there is no player.
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ConfigError(f"--baseline {unknown[0]}: must be one of {', '.join(BASELINES)}")
    models = ((MODEL, GREEDY) if greedy else (MODEL,)) if has_model else ()
    return (*(name for name in BASELINES if name in baselines), *models)


def plan_of_run(run: ResolvedRun, columns: tuple[str, ...]) -> EvalPlan:
    """Return the plan of a run config: ``evaluation.tasks``, distributed by weight."""
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


class SuiteEnv(Section):
    """One environment of a suite."""

    id: str
    """Id, alias, `module:Class` or `ADAPTER::FOREIGN_ID`."""
    name: str | None = None
    """Name in the table. Default: its id."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    split: str | None = None
    """Split of the tasks. Default: the split of the suite."""
    tasks: PositiveInt | None = None
    """Number of tasks, or all tasks if the split has fewer. Default: `tasks` of the suite."""
    attempts: PositiveInt | None = None
    """Sampled episodes per task. Default: `attempts` of the suite."""
    max_turns: PositiveInt | None = None
    """Maximum number of turns. Default: the value in the environment's spec."""
    if_sandbox: bool = False
    """Leave out the environment, with a reason, if its sandbox does not work on this machine."""


class Suite(Section):
    """Several environments that are evaluated together."""

    suite: str = Field(min_length=1)
    """Name of the suite."""
    seed: Seed = 0
    """Seed of tasks and sampling."""
    split: str = "test"
    """Split of the tasks. Do not train on it."""
    tasks: PositiveInt = 100
    """Number of tasks per environment."""
    attempts: PositiveInt = 1
    """Sampled episodes per task."""
    greedy: bool = False
    """Whether a model also plays each task once with greedy decoding."""
    envs: tuple[SuiteEnv, ...] = Field(min_length=1)
    """The environments."""
    run: dict[str, Any] = Field(default_factory=dict)
    """Other keys of a run config, such as `rollout: {max_new_tokens: 64}`."""

    @model_validator(mode="after")
    def _no_key_twice(self) -> Suite:
        names = self.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"envs: two have the name {twice[0]!r}; set different names")
        taken = sorted({"env", "evaluation", "seed", "name", "model"} & self.run.keys())
        if taken:
            raise ValueError(f"run.{taken[0]}: has no effect in a suite, which has its own keys")
        return self

    @property
    def names(self) -> list[str]:
        """Return the names of its environments."""
        return [env.name or env.id for env in self.envs]

    def run_mapping(self) -> dict[str, Any]:
        """Return the run config of the suite, as a mapping, without a model."""
        envs = [
            {
                "id": env.id,
                "name": name,
                "run": _splits(env.split or self.split)
                | ({"max_turns": env.max_turns} if env.max_turns else {}),
                **env.options,
            }
            for env, name in zip(self.envs, self.names, strict=True)
        ]
        own = {"name": self.suite, "seed": self.seed, "env": envs}
        return {**self.run, **own, "evaluation": {"greedy": self.greedy}}


def _splits(split: str) -> dict[str, str]:
    """Return the splits of an environment; ``all`` must not overlap with an unused one."""
    return {"evaluation_split": split} | ({"split": split} if split == ALL_TASKS else {})


def read_suite(
    mapping: dict[str, Any], source: Path, settings: Sequence[str]
) -> tuple[Suite, list[str]]:
    """Return a suite, and the settings that belong to the run config.

    Args:
        mapping: The content of the file.
        source: Name of the source in errors.
        settings: Items ``key=value``. Those with a key of the suite replace its value.

    Raises:
        ConfigError: With one line per problem.
    """
    own = [s for s in settings if s.partition("=")[0].partition(".")[0] in Suite.model_fields]
    for setting in own:
        apply_override(mapping, setting)
    others = [s for s in settings if s not in own]
    for setting in others:
        section = setting.partition("=")[0].partition(".")[0]
        if section not in AsyncRun.model_fields:
            near = did_you_mean(section, (*Suite.model_fields, *AsyncRun.model_fields))
            said = near or f" Keys of a suite: {', '.join(Suite.model_fields)}."
            raise ConfigError(f"command line: {section}: unknown key.{said}")
        if section in ("env", "evaluation", "name"):
            keys = "tasks=, attempts=, split=, greedy= or envs.0.options.KEY="
            raise ConfigError(f"{setting}: has no effect with a suite; use {keys}")
    try:
        return Suite.model_validate(mapping), others
    except ValidationError as e:
        lines = [f"{source}: {problem.within()}" for problem in of_validation(e, Suite)]
        raise ConfigError("\n".join(lines)) from None


def left_out(suite: Suite) -> dict[str, str]:
    """Return the environments that cannot run on this machine: name -> reason.

    Raises:
        UserError: If there is no such environment or sandbox.
    """
    pairs = zip(suite.names, suite.envs, strict=True)
    whys = {name: _why_left_out(env) for name, env in pairs if env.if_sandbox}
    return {name: why for name, why in whys.items() if why}


def _why_left_out(env: SuiteEnv) -> str:
    asked = env.options.get("sandbox") or registry.env_spec(env.id).sandbox
    name = asked.get("id") if isinstance(asked, dict) else asked
    return _sandbox_fault(str(name)) if name else ""


@cache
def _sandbox_fault(sandbox: str) -> str:
    """Return why a sandbox does not work here. Empty if it works. Each sandbox is checked once."""
    return registry.sandbox_service().fault(sandbox)
