"""From a command line to an evaluation that can start, or go on.

Takes: a config, a suite, a run directory or ids; a model, baselines. Gives: a resolved run, its
plan and its folder. Never: starts a part, or takes a folder that holds something for a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart_core.config.load import apply_override, dump_yaml, is_suite, read_yaml
from rollart_core.config.resolve import ResolvedRun
from rollart_core.errors import ConfigError
from rollart_core.evals import plan as plans
from rollart_core.evals.plan import EvalPlan, Suite, left_out, read_suite
from rollart_core.evals.report import env_facts
from rollart_core.evals.table import Table, merged
from rollart_core.runtime.prepare import prepare_mapping
from rollart_core.store.resume import BEFORE
from rollart_core.store.run_dir import TRAINED_MODEL, new_run_dir
from rollart_core.suggestions import no_run

FOLDER = "evals"
"""Where the folders of evaluations are made, unless they are told otherwise."""
_URLS = ("http://", "https://")
_NOBODY: Mapping[str, Any] = {"path": "nobody/none"}
"""The model of an evaluation without one: no part reads it, and no record shows it."""
_OF_A_MODEL = ("model", "engine", "rollout.temperature", "rollout.max_new_tokens")
_OF_VALIDATION: Mapping[str, tuple[str, ...]] = {
    "evaluation": ("every_batches", "validation_tasks", "validation_split"),
    "checkpoint": ("keep_best",),
    "stop": ("when",),
}
_MAY_CHANGE = ("engine.", "runtime.", "failures.", "deadlines.", "rollout.max_concurrent")
"""What may be otherwise when an evaluation is gone on with: not what decides about its figures."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What a command line asks for."""

    config: str | None = None
    """A config file, a suite, or a run directory."""
    settings: Sequence[str] = ()
    """``key=value`` each."""
    env: str | None = None
    model: str | None = None
    name: str | None = None
    """What the server calls the model."""
    tokenizer: str | None = None
    baselines: Sequence[str] = ()
    out: Path | None = None
    beside: Sequence[tuple[str, Table]] = ()
    """Columns of other reports, and what the command line calls each."""

    @property
    def begins_anew(self) -> bool:
        """True when anything but settings was given."""
        given = (self.config, self.env, self.model, self.name, self.tokenizer, self.out)
        return any(given) or bool(self.baselines)


@dataclass(frozen=True, slots=True)
class StartedEval:
    """An evaluation that can be played."""

    run: ResolvedRun
    plan: EvalPlan
    folder: Path


def begin(asked: EvalRequest) -> StartedEval:
    """Check everything and make the folder of a new evaluation.

    Raises:
        ConfigError: When anything of it is wrong; nothing is made then.
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
    merged(_blank(run, plan), asked.beside)  # what cannot stand together is told now
    folder = _folder(asked.out, run)
    config = dump_yaml(plans.record_of(run, plan))
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    plan.write(folder)
    return StartedEval(run, plan, folder)


def go_on(folder: Path, settings: Sequence[str]) -> StartedEval:
    """Return an evaluation as it was begun.

    Args:
        folder: Its own.
        settings: What is otherwise now: nothing that decides about figures.

    Raises:
        ConfigError: When it is none, or cannot go on like that.
    """
    plan = EvalPlan.read(folder)
    wrong = [s for s in settings if not s.startswith(_MAY_CHANGE)]
    if wrong:
        raise ConfigError(
            f"--resume: {wrong[0]} would change what was begun; begin anew, or set only keys of "
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
    """Return a mapping to begin with, and where it is from."""
    if not asked.config:
        return {"name": "eval"}, "command line"
    path = Path(asked.config)
    mapping = _of_run(path, asked) if path.is_dir() else read_yaml(path)
    if is_suite(mapping) and asked.env:
        raise ConfigError("--env: a suite names its environments; leave one of the two out")
    if not is_suite(mapping):
        mapping["runtime"] = _on_this_machine(mapping.get("runtime"))
        mapping.pop("engines", None)  # classes of engines are those of pools elsewhere
    return mapping, asked.config


def _of_run(path: Path, asked: EvalRequest) -> dict[str, Any]:
    """Return the config of a run with the model it trained, or that of an evaluation.

    Raises:
        ConfigError: When it is neither, or the run has trained no model yet.
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
                f"{path}: has no {TRAINED_MODEL} yet, which a run writes at its end: go on with it "
                f"by `rollart run --resume {path}`, or name a model with --model"
            )
        mapping.pop("model", None)  # the one that training began with is not the run's
    return mapping


def _sets_model(settings: Sequence[str]) -> bool:
    return any(s.partition("=")[0].partition(".")[0] == "model" for s in settings)


def _on_this_machine(runtime: object) -> object:
    """Return the runtime of an evaluation: one trainer's ranks are none of its business."""
    if isinstance(runtime, dict) and runtime.get("kind", "inline") == "inline":
        return runtime
    return {"kind": "inline"}


def _of_suite(suite: Suite, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the run config of what of a suite can be played here, and what cannot."""
    missing = left_out(suite)
    mapping = suite.run_mapping()
    mapping["env"] = [env for env in mapping["env"] if env["name"] not in missing]
    if not mapping["env"]:
        whys = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise ConfigError(f"{source}: no environment of it can be played here: {whys}")
    return mapping, missing


def _with_model(mapping: dict[str, Any], asked: EvalRequest, settings: Sequence[str]) -> bool:
    """Put the model that was asked for in its place; return whether a model plays at all."""
    if asked.model:
        _set_model(mapping, asked.model, asked.tokenizer)
    elif asked.tokenizer:
        raise ConfigError("--tokenizer goes with --model URL")
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
        raise ConfigError("nobody plays: name a model with --model, or a --baseline")
    if asked.name is not None:
        apply_override(mapping, f"engine.model={asked.name}")
    return has_model


def _set_model(mapping: dict[str, Any], model: str, tokenizer: str | None) -> None:
    """Have the mapping score this model: files by the engine there is, a URL by ``openai``."""
    before: object
    if not model.startswith(_URLS):
        if tokenizer is not None:
            raise ConfigError("--tokenizer goes with --model URL: a model in files has its own")
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
    """Remove the keys of validation: any split may be evaluated, that of validations too."""
    for section, keys in _OF_VALIDATION.items():
        if isinstance(mapping.get(section), dict):
            mapping[section] = {k: v for k, v in mapping[section].items() if k not in keys}


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
    mapping.setdefault("stop", {"batches": 1})  # of training, which there is none of
    return prepare_mapping(
        mapping, source, keys, trains=False, generates=has_model, makes_folder=makes_folder
    )


def _blank(run: ResolvedRun, plan: EvalPlan) -> Table:
    """Return the table that an evaluation will fill."""
    envs = {env.name: env_facts(run, env) for env in run.envs}
    places = ((name, column) for name in envs for column in plan.columns)
    return Table(dict(envs), {place: {} for place in places})


def _folder(out: Path | None, run: ResolvedRun) -> Path:
    if out is None:
        return new_run_dir(run.config.runs_dir, run.config.name)
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: holds something already; --resume {out} goes on with it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.strerror}") from e
    return out.resolve()
