"""Preparation of an evaluation: from a command line to one that can start or resume.

Takes: a config, a suite, a run directory or ids; a model, baselines. Gives: a resolved run, its
plan and its folder. Never: starts a worker, or uses a nonempty folder for a new evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart_core.config.load import apply_override, dump_yaml, is_suite, read_yaml
from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.env import ALL_TASKS
from rollart_core.errors import ConfigError
from rollart_core.runtime.prepare import prepare_mapping
from rollart_core.store.resume import BEFORE
from rollart_core.store.run_dir import TRAINED_MODEL, new_run_dir
from rollart_core.suggestions import no_run
from rollart_evals import plan as plans
from rollart_evals.plan import EvalPlan, Suite, left_out, read_suite
from rollart_evals.report import env_facts
from rollart_evals.table import Table, merged

FOLDER = "evals"
"""The default parent folder of evaluations."""
_URLS = ("http://", "https://")
_NOBODY: Mapping[str, Any] = {"path": "nobody/none"}
"""A placeholder model for an evaluation without a model. No worker reads it, and no record has
it."""
_OF_A_MODEL = ("model", "engine", "rollout.temperature", "rollout.max_new_tokens")
_OF_VALIDATION: Mapping[str, tuple[str, ...]] = {
    "evaluation": ("every_batches", "validation_tasks", "validation_split"),
    "checkpoint": ("keep_best",),
    "stop": ("when",),
}
_MAY_CHANGE = ("engine.", "runtime.", "failures.", "deadlines.", "rollout.max_concurrent")
"""Keys that may change when an evaluation resumes. They do not affect its results."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The arguments of the command line."""

    config: str | None = None
    """A config file, a suite, or a run directory."""
    settings: Sequence[str] = ()
    """Items ``key=value``."""
    env: str | None = None
    model: str | None = None
    name: str | None = None
    """Name of the model on the server."""
    tokenizer: str | None = None
    baselines: Sequence[str] = ()
    out: Path | None = None
    beside: Sequence[tuple[str, Table]] = ()
    """Source on the command line and table of each further report."""

    @property
    def begins_anew(self) -> bool:
        """True if anything except settings was given."""
        given = (self.config, self.env, self.model, self.name, self.tokenizer, self.out)
        return any(given) or bool(self.baselines)


@dataclass(frozen=True, slots=True)
class StartedEval:
    """An evaluation that is ready to run."""

    run: ResolvedRun
    plan: EvalPlan
    folder: Path


def begin(asked: EvalRequest) -> StartedEval:
    """Validate everything and create the folder of a new evaluation.

    Raises:
        ConfigError: If anything is invalid. Then nothing is created.
    """
    mapping, source = _mapping(asked)
    suite, settings, missing = None, list(asked.settings), dict[str, str]()
    if is_suite(mapping):
        suite, settings = read_suite(mapping, Path(source), settings)
        mapping, missing = _of_suite(suite, source)
    elif asked.env:
        mapping["env"] = asked.env
    has_model = _with_model(mapping, asked, settings)
    run = _resolved(mapping, source, settings, has_model=has_model, makes_folder=asked.out is None)
    greedy = run.config.evaluation.greedy
    columns = plans.columns_of(asked.baselines, has_model=has_model, greedy=greedy)
    plan = (
        plans.plan_of_suite(suite, columns, missing) if suite else plans.plan_of_run(run, columns)
    )
    merged(_blank(run, plan), asked.beside)  # report columns in conflict now
    folder = _folder(asked.out, run)
    config = dump_yaml(plans.record_of(run, plan))
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    plan.write(folder)
    return StartedEval(run, plan, folder)


def go_on(folder: Path, settings: Sequence[str]) -> StartedEval:
    """Return the evaluation to resume.

    Args:
        folder: Folder of the evaluation.
        settings: Changed keys. They must not affect the results.

    Raises:
        ConfigError: If it is not an evaluation, or cannot resume with these settings.
    """
    plan = EvalPlan.read(folder)
    wrong = [s for s in settings if not s.startswith(_MAY_CHANGE)]
    if wrong:
        raise ConfigError(
            f"--resume: {wrong[0]} would change the results; start a new evaluation, or set only "
            f"{', '.join(k.rstrip('.') for k in _MAY_CHANGE)}"
        )
    mapping = {**BEFORE, **read_yaml(folder / "config.yaml")}
    if not plan.has_model:
        mapping["model"] = dict(_NOBODY)
    run = _resolved(
        mapping, str(folder), list(settings), has_model=plan.has_model, makes_folder=False
    )
    return StartedEval(run, plan, folder.resolve())


def _mapping(asked: EvalRequest) -> tuple[dict[str, Any], str]:
    """Return the initial mapping and its source."""
    if not asked.config:
        return {"name": "eval"}, "command line"
    path = Path(asked.config)
    mapping = _of_run(path, asked) if path.is_dir() else read_yaml(path)
    if is_suite(mapping) and asked.env:
        raise ConfigError("--env: a suite defines its environments; remove one of the two")
    if not is_suite(mapping):
        mapping["runtime"] = _on_this_machine(mapping.get("runtime"))
        mapping.pop("engines", None)  # engine classes belong to the pools of the training run
    return mapping, asked.config


def _of_run(path: Path, asked: EvalRequest) -> dict[str, Any]:
    """Return the config of a run with its trained model, or the config of an evaluation.

    Raises:
        ConfigError: If it is neither, or the run has no trained model yet.
    """
    if not (path / "config.yaml").is_file():
        raise ConfigError(no_run(path, "config.yaml"))
    mapping = read_yaml(path / "config.yaml")
    trained = path / TRAINED_MODEL
    if trained.is_dir():
        _set_model(mapping, str(trained), None)
    elif not ((path / plans.FILE).is_file() or asked.model or _sets_model(asked.settings)):
        if not asked.baselines:
            raise ConfigError(
                f"{path}: has no {TRAINED_MODEL} yet (a run writes it at its end): resume it "
                f"with `rollart run --resume {path}`, or set a model with --model"
            )
        mapping.pop("model", None)  # this is the initial model, not the trained one
    return mapping


def _sets_model(settings: Sequence[str]) -> bool:
    return any(s.partition("=")[0].partition(".")[0] == "model" for s in settings)


def _on_this_machine(runtime: object) -> object:
    """Return the runtime of an evaluation, without the trainer's ranks."""
    if isinstance(runtime, dict) and runtime.get("kind", "inline") == "inline":
        return runtime
    return {"kind": "inline"}


def _of_suite(suite: Suite, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the run config of the suite's environments that can run here, and the others."""
    missing = left_out(suite)
    mapping = suite.run_mapping()
    mapping["env"] = [env for env in mapping["env"] if env["name"] not in missing]
    if not mapping["env"]:
        whys = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise ConfigError(f"{source}: none of its environments can run on this machine: {whys}")
    return mapping, missing


def _with_model(mapping: dict[str, Any], asked: EvalRequest, settings: Sequence[str]) -> bool:
    """Set the requested model. Return whether a model plays."""
    if asked.model:
        _set_model(mapping, asked.model, asked.tokenizer)
    elif asked.tokenizer:
        raise ConfigError("--tokenizer requires --model URL")
    said = _sets_model(settings)
    untrained = isinstance(mapping.get("model"), dict) and mapping["model"].get("kind") == "new"
    has_model = said or ("model" in mapping and not (asked.baselines and untrained))
    if not has_model and asked.baselines:
        idle = [s for s in settings if s.partition("=")[0].startswith(_OF_A_MODEL)]
        if asked.name or idle:
            what = "--name" if asked.name else idle[0]
            raise ConfigError(f"{what}: has no effect without a model; add --model or remove it")
        mapping["model"] = dict(_NOBODY)
        mapping.pop("engine", None)
    elif not has_model and "env" in mapping:
        raise ConfigError("there is no player: set a model with --model, or a --baseline")
    if asked.name is not None:
        apply_override(mapping, f"engine.model={asked.name}")
    return has_model


def _set_model(mapping: dict[str, Any], model: str, tokenizer: str | None) -> None:
    """Set the model of the mapping. Files use the configured engine, a URL uses ``openai``."""
    before: object
    if not model.startswith(_URLS):
        if tokenizer is not None:
            raise ConfigError("--tokenizer requires --model URL: a model in files has its own")
        before = mapping.get("model")
        had = before if isinstance(before, dict) else {}
        kept = {key: had[key] for key in ("dtype", "device") if key in had}
        mapping["model"] = {"path": model, **kept}
        return
    mapping["model"] = {"path": tokenizer} if tokenizer else {"kind": "remote"}
    before = mapping.get("engine")
    options = before if isinstance(before, dict) and before.get("id") == "openai" else {}
    mapping["engine"] = {**options, "id": "openai", "base_url": model}
    if not tokenizer and isinstance(mapping.get("rollout"), dict):
        mapping["rollout"].pop("max_context_tokens", None)


def _remove_validation(mapping: dict[str, Any]) -> None:
    """Remove the keys of validation, so that any split may be evaluated."""
    for section, keys in _OF_VALIDATION.items():
        if isinstance(mapping.get(section), dict):
            mapping[section] = {k: v for k, v in mapping[section].items() if k not in keys}


def _remove_training(mapping: dict[str, Any]) -> None:
    """Remove other splits if ``all`` is evaluated. An evaluation does not use them."""
    evaluation, rollout = mapping.get("evaluation"), mapping.setdefault("rollout", {})
    asked = evaluation.get("split") if isinstance(evaluation, dict) else None
    if asked == ALL_TASKS and isinstance(rollout, dict):
        rollout["split"] = asked
        mapping.pop("warm_start", None)


def _resolved(
    mapping: dict[str, Any],
    source: str,
    settings: Sequence[str],
    *,
    has_model: bool,
    makes_folder: bool,
) -> ResolvedRun:
    mapping["runs_dir"] = FOLDER
    _remove_validation(mapping)
    keys = [apply_override(mapping, setting) for setting in settings]
    _remove_training(mapping)
    mapping.setdefault("stop", {"batches": 1})  # required, but has no effect here
    return prepare_mapping(
        mapping, source, keys, trains=False, generates=has_model, makes_folder=makes_folder
    )


def _blank(run: ResolvedRun, plan: EvalPlan) -> Table:
    """Return the empty table of an evaluation."""
    envs = {env.name: env_facts(run, env) for env in run.envs}
    places = ((name, column) for name in envs for column in plan.columns)
    return Table(dict(envs), {place: {} for place in places})


def _folder(out: Path | None, run: ResolvedRun) -> Path:
    if out is None:
        return new_run_dir(run.config.runs_dir, run.config.name)
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: the folder is not empty; use --resume {out} to resume it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be created: {e.strerror}") from e
    return out.resolve()
