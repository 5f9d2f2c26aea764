"""Preparation of a run, which checks its config and reports all problems in one error.

    file ──> schema ──> contradictions        ┐
                        plugins, options      ├──> ResolvedRun, or one error, a line each
                        executables, files    │
                        the mapper's pools    ┘

Takes: a config. Gives: a resolved run, or one ConfigError. Never: starts or fetches anything. The
nodes of a cluster are checked later, before workers start there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart_core.config.load import (
    RECORD_KEY,
    apply_override,
    as_error,
    read_run_config,
    validate,
)
from rollart_core.config.model import ModelPath
from rollart_core.config.problems import Problem
from rollart_core.config.resolve import Resolution, ResolvedEnv, ResolvedRun, resolve_all
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import InlineRuntime, RayRuntime
from rollart_core.contracts.adapter import split_id
from rollart_core.errors import ConfigError, UserError, described
from rollart_core.models.run_template import template_problems
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.plugins import registry
from rollart_core.runtime.run_envs import few_tasks
from rollart_core.runtime.workers import WorkersRuntime
from rollart_core.store.run_dir import runs_dir_fault
from rollart_core.types import Observation

NO_ENVIRONMENT = "has no environment"
"""Marks a mapper's message about a name that is not an environment of the run."""


def prepare(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    import_classes: bool = False,
    makes_folder: bool = True,
) -> ResolvedRun:
    """Read a run config and resolve everything that it refers to.

    Args:
        path: A YAML file.
        overrides: Overrides in the form ``key=value``.
        import_classes: Also import the class of every plugin in this process.
        makes_folder: False if the run continues in an existing directory.

    Raises:
        ConfigError: With one line per problem.
    """
    mapping = read_run_config(Path(path))
    overridden = [apply_override(mapping, override) for override in overrides]
    return prepare_mapping(
        mapping, path, overridden, import_classes=import_classes, makes_folder=makes_folder
    )


def prepare_mapping(
    mapping: Mapping[str, Any],
    source: str | Path,
    overridden: Sequence[tuple[str, ...]] = (),
    *,
    import_classes: bool = False,
    trains: bool = True,
    generates: bool = True,
    makes_folder: bool = True,
) -> ResolvedRun:
    """Resolve everything that a config refers to.

    Args:
        mapping: The config as read, with overrides applied.
        source: The name of the config in errors.
        overridden: Paths of the keys that were set on the command line.
        import_classes: As for :func:`prepare`.
        trains: False if the model is only evaluated.
        generates: False if no model is used.
        makes_folder: False if no folder is created in ``runs_dir``.

    Raises:
        ConfigError: As for :func:`prepare`.
    """
    config, problems = validate(mapping)
    if config is None:
        raise as_error(problems, source, overridden)
    runtime = config.runtime
    joins = isinstance(runtime, RayRuntime) and runtime.address is not None
    found = resolve_all(
        config,
        import_classes=import_classes,
        trains=trains,
        generates=generates,
        look_here=True,
        joins=joins,
        recorded=RECORD_KEY in mapping,
    )
    problems = [*problems, *found.problems, *_no_places(found)]
    if generates:
        problems += template_problems(config)
    if makes_folder and (fault := runs_dir_fault(config.runs_dir)):
        problems.append(Problem(("runs_dir",), fault))
    if trains and isinstance(runtime, InlineRuntime):
        problems += no_device(config.model)
    if isinstance(runtime, RayRuntime):
        problems += unset_variables(runtime)
    if found.run is None or problems:
        raise as_error(problems, source, overridden)
    return found.run


@dataclass(frozen=True, slots=True)
class TaskPreview:
    """The tasks of one environment, for the dry run."""

    env: str
    num_tasks: Mapping[str, int | None]
    """Split that the run uses -> number of tasks; None: no end."""
    example: Observation
    """The first observation of the first training task."""
    notes: Sequence[str]
    """What the environment says about its tasks (the optional method ``notes``)."""


def preview_tasks(run: ResolvedRun, source: str | Path) -> list[TaskPreview]:
    """Load the tokenizer of a local model, and read tasks of environments that are built quickly.

    Raises:
        ConfigError: If the tokenizer or an environment cannot be loaded, or an environment has
            fewer tasks than the config asks for.
    """
    found, problems = list[TaskPreview](), _tokenizer_problems(run.config)
    for i, env in enumerate(run.envs):
        if _needs_more(env):
            continue
        try:
            found.append(_preview(env))
        except Exception as e:  # of any environment
            reason = str(e) if isinstance(e, UserError) else described(e)
            problems.append(Problem(("env", i) if run.is_mixed else ("env",), reason))
    splits = {env.name: env.evaluation_split for env in run.envs}
    counts = {one.env: one.num_tasks[splits[one.env]] for one in found}
    if problems := [*problems, *few_tasks(run, counts)]:
        raise as_error(problems, source)
    return found


def _tokenizer_problems(config: RunConfig) -> list[Problem]:
    """Return why the tokenizer of a model in a local folder, or its template, cannot be loaded."""
    model = config.model
    if not isinstance(model, ModelPath) or not Path(model.path).expanduser().is_dir():
        return []
    try:
        load_tokenizer(Path(model.path).expanduser(), model.chat_template_kwargs)
    except ConfigError as e:
        return [Problem(("model", "path"), str(e).removeprefix("model.path: "))]
    return []


def _needs_more(env: ResolvedEnv) -> bool:
    """Return whether an environment needs more than this process: a sandbox, a network, time."""
    spec, options = env.spec, env.plugin.options
    elsewhere = spec.sandbox or spec.network or spec.kind == "agent" or split_id(spec.id)
    in_sandbox = registry.ISOLATION in options or "sandbox" in options
    return bool(elsewhere) or spec.slow_start or in_sandbox


def _preview(env: ResolvedEnv) -> TaskPreview:
    made: Any = env.plugin.build()
    try:
        counted = getattr(made, "num_tasks", lambda split: None)
        splits = (env.split, env.validation_split, env.evaluation_split, env.check_split)
        counts = {split: counted(split) for split in splits if split}
        example, _ = made.reset(seed=0, options={"task": 0, "split": env.split})
        notes: Sequence[str] = getattr(made, "notes", tuple)()
        return TaskPreview(env.name, counts, example, notes)
    finally:
        made.close()


def no_device(model: object) -> list[Problem]:
    """Return why the model cannot use its device; imports torch only for ``cuda``."""
    if getattr(model, "device", None) != "cuda":
        return []
    try:
        import torch
    except ImportError:  # the engine's class reports this
        return []
    if torch.cuda.is_available():
        return []
    message = "cuda: torch sees no CUDA device here; use auto or cpu, or install torch with CUDA"
    return [Problem(("model", "device"), message)]


def unset_variables(runtime: RayRuntime) -> list[Problem]:
    """Return which of the variables for the workers this process does not have."""
    return [
        Problem(
            ("runtime", "env_vars"),
            f"the environment variable {name} is not set here: export it, or remove its name",
        )
        for name in runtime.env_vars
        if not os.environ.get(name)
    ]


def _strange_classes(config: RunConfig) -> bool:
    pools = {pool.name for pool in getattr(config.runtime, "pools", ())}
    return any(one.name not in pools for one in config.engines)


def _no_places(found: Resolution) -> list[Problem]:
    """Return why the run cannot be placed on the pools that its config declares."""
    runtime = found.config.runtime
    if not isinstance(runtime, RayRuntime) or not runtime.pools:
        return []
    if found.mapper is None or not found.envs or _strange_classes(found.config):
        return []  # other problems, already reported, must be fixed first
    listed = found.config.env if isinstance(found.config.env, tuple) else (found.config.env,)
    runtime_class: type[WorkersRuntime] = registry.resolve("runtimes", runtime.kind)
    try:
        runtime_class.check_pools(found)
    except ConfigError as e:
        lines = str(e).splitlines()
    else:
        return []
    if len(found.envs) < len(listed):  # the mapper's options may name unresolved environments
        lines = [line for line in lines if NO_ENVIRONMENT not in line]
    return [Problem(("runtime", "pools"), line) for line in lines]
