"""Preparation of a run, which checks its config and reports all problems in one error.

    file ──> schema ──> contradictions        ┐
                        plugins, options      ├──> ResolvedRun, or one error, a line each
                        executables, files    │
                        the mapper's pools    ┘

Takes: a config. Gives: a resolved run, or one ConfigError. Never: starts or fetches anything. The
nodes of a cluster are checked later, before workers start there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart_core.config.load import (
    RECORD_KEY,
    apply_override,
    as_error,
    read_run_config,
    validate,
)
from rollart_core.config.problems import Problem
from rollart_core.config.resolve import Resolution, ResolvedRun, resolve_all
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import InlineRuntime, RayRuntime
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_core.runtime.workers import WorkersRuntime
from rollart_core.store.run_dir import runs_dir_fault

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
    if makes_folder and (fault := runs_dir_fault(config.runs_dir)):
        problems.append(Problem(("runs_dir",), fault))
    if trains and isinstance(runtime, InlineRuntime):
        problems += no_device(config.model)
    if found.run is None or problems:
        raise as_error(problems, source, overridden)
    return found.run


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
