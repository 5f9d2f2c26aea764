"""The run directory: what lies where, who writes it, and what a checkpoint knows besides weights.

Takes: a config. Gives: paths, and a lock. Never: overwrites a run; a new one gets a new name.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
LOCK_FILE = "lock"


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


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run directory: one process at a time writes to it.

    The lock is the operating system's, on a file, and ends with its process.

    Raises:
        ConfigError: When another process holds it.
    """
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
            raise ConfigError(
                f"{run_dir} is in use: process {holder} of this machine, or of one that shares the "
                "folder, is running it; wait for its end or interrupt it first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
