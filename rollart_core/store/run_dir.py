"""The run directory: what lies where, and what a checkpoint knows besides weights.

Takes: a config. Gives: paths. Never: overwrites a run; a new one gets a new name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollart_core import strict_json
from rollart_core.errors import ConfigError
from rollart_core.scheduling.tasks import TaskSourceState
from rollart_core.types import Task

TRAINED_MODEL = "model-trained"
"""Folder of the model that a run has trained; it is written at the end."""
STATE_FILE = "run_state.json"
"""Of a checkpoint; written last."""


def new_run_dir(runs_dir: str, name: str) -> Path:
    """Make ``<runs_dir>/<name>-<time>`` and return it.

    Raises:
        ConfigError: When it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = Path(runs_dir) / f"{name}-{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise ConfigError(f"runs_dir: cannot make {path}: {e.strerror}") from e
        return path.resolve()
    raise ConfigError(f"runs_dir: too many runs named {name}-{stamp} in {runs_dir}")


def runs_dir_fault(runs_dir: str) -> str | None:
    """Say why no run directory can be made in ``runs_dir``; None when it seems that one can."""
    folder = Path(runs_dir)
    while not (folder.exists() or folder.is_symlink()) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder: name one that is there, or that can be made"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to: name another folder, or change its permissions"
    return None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file beside and rename it, so that a reader never sees half of it.

    What is not finite becomes null.
    """
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(strict_json.dumps(content) + "\n", encoding="utf-8")
    os.replace(beside, path)


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint knows besides the weights."""

    policy_version: int
    train_step: int
    task_source: TaskSourceState
    next_ordinal: int
    """Number of the first group that had not been begun."""
    num_requeued: int
    """Tasks that had been put back into the source."""
    open_groups: Mapping[str, Task]
    """Each group that was begun and neither trained nor dropped; the journal knows more of it."""
    train_wall_s: float
    validations: Sequence[Mapping[str, Any]] = ()
    """Those so far, as ``Validation.as_dict`` of ``scheduling.validations`` gives them."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What the guard knows of the batches so far; nothing when it is off."""
    lr_factor: float = 1.0
    """What the guard has multiplied the learning rate by."""

    def write(self, folder: Path, files: Mapping[str, object]) -> None:
        """Put it beside the weights, with what is to be known of their ``files``."""
        write_json(folder / STATE_FILE, {**asdict(self), "files": files})

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read it back.

        Raises:
            ValueError: When it is not one that this release wrote.
        """
        try:
            content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            content.pop("files", None)
            source, groups = content.pop("task_source"), content.pop("open_groups")
            validations = tuple(content.pop("validations", ()))
            return cls(
                **content,
                validations=validations,
                open_groups={name: Task(**task) for name, task in groups.items()},
                task_source=TaskSourceState(
                    **{**source, "requeued": tuple(Task(**t) for t in source["requeued"])}
                ),
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{STATE_FILE} is not of this release: {e}") from e


def checkpoint_folder(run_dir: Path, policy_version: int) -> Path:
    """Return where the checkpoint of a version lies."""
    return run_dir / "checkpoints" / f"v{policy_version:06d}"
