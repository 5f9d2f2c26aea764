"""A run that can start here: whatever its config has wrong, or asks for in vain, is said at once.

    file ──> schema ──> what contradicts what ┐
                        plugins, options      ├──> one error, a line each ──> ResolvedRun
                        executables, files    │
                        the mapper's pools    ┘

Takes: a config. Gives: a resolved run, or one ConfigError. Never: starts or fetches anything. What
only other machines know (the nodes of a cluster) is asked of them before parts start there.
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
"""What a mapper says of a name that is none of the run's environments."""


def prepare(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    import_classes: bool = False,
    makes_folder: bool = True,
) -> ResolvedRun:
    """Read a run config and find all that it asks for.

    Args:
        path: A YAML file.
        overrides: ``key=value`` each.
        import_classes: Also import every plugin's class in this process.
        makes_folder: False: a run goes on in the directory that it has.

    Raises:
        ConfigError: With a line for each thing that is wrong or missing.
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
    """Find all that a config asks for.

    Args:
        mapping: As read, overrides applied.
        source: What errors call it.
        overridden: Paths of keys that came from the command line.
        import_classes: As :func:`prepare` has it.
        trains: False: the model is only evaluated.
        generates: False: no model plays at all.
        makes_folder: False: nothing is made in ``runs_dir``.

    Raises:
        ConfigError: As :func:`prepare`.
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
        problems += _no_device(config)
    if found.run is None or problems:
        raise as_error(problems, source, overridden)
    return found.run


def _no_device(config: RunConfig) -> list[Problem]:
    """Return why the model cannot be where the config wants it; imports torch for CUDA alone."""
    if getattr(config.model, "device", None) != "cuda":
        return []
    try:
        import torch
    except ImportError:  # which the engine's class tells of
        return []
    if torch.cuda.is_available():
        return []
    message = "cuda: torch sees no CUDA device here; take auto or cpu, or a torch with CUDA"
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
        return []  # there is more to mend first, which is told of
    listed = found.config.env if isinstance(found.config.env, tuple) else (found.config.env,)
    runtime_class: type[WorkersRuntime] = registry.resolve("runtimes", runtime.kind)
    try:
        runtime_class.check_pools(found)
    except ConfigError as e:
        lines = str(e).splitlines()
    else:
        return []
    if len(found.envs) < len(listed):  # the mapper's options may name the others
        lines = [line for line in lines if NO_ENVIRONMENT not in line]
    return [Problem(("runtime", "pools"), line) for line in lines]
