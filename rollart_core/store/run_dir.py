"""The run directory: its paths, its lock, and the state in a checkpoint besides the weights.

Takes: a config. Gives: paths, and a lock. Never: overwrites a run; a new run gets a new name.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
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
"""Folder of the trained model; it is written at the end of a run."""
STATE_FILE = "run_state.json"
"""State file of a checkpoint; it is written last."""
LOCK_FILE = "lock"


def new_run_dir(runs_dir: str, name: str) -> Path:
    """Create ``<runs_dir>/<name>-<time>`` and return its path.

    Raises:
        ConfigError: If it cannot be created.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = Path(runs_dir) / f"{name}-{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise ConfigError(f"runs_dir: cannot create {path}: {e.strerror}") from e
        return path.resolve()
    raise ConfigError(f"runs_dir: too many runs named {name}-{stamp} in {runs_dir}")


def newest_run(runs_dir: str, name: str) -> Path | None:
    """Return the newest run directory of this name that has a checkpoint; None if there is none."""
    of_name = re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = [
        (match[1], int(match[2] or 1), path)
        for path in Path(runs_dir).glob(f"{name}-*")
        if (match := of_name.fullmatch(path.name))
        and any(path.glob(f"checkpoints/v*/{STATE_FILE}"))
    ]
    return max(found)[2] if found else None


def runs_dir_fault(runs_dir: str) -> str | None:
    """Return why no run directory can be created in ``runs_dir``; None if no problem is found."""
    folder = Path(runs_dir)
    while not (folder.exists() or folder.is_symlink()) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder: set a folder that exists or can be created"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to: set another folder, or change its permissions"
    return None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a temporary file and rename it, so that a reader never sees a partial file.

    Numbers that are not finite become null.
    """
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(strict_json.dumps(content) + "\n", encoding="utf-8")
    os.replace(beside, path)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in a checkpoint, besides the weights."""

    policy_version: int
    train_step: int
    task_source: TaskSourceState
    next_ordinal: int
    """Number of the first group that had not been started."""
    num_requeued: int
    """Number of tasks that had been put back into the source."""
    open_groups: Mapping[str, Task]
    """Groups that were started and neither trained nor dropped; the journal has their details."""
    train_wall_s: float
    validations: Sequence[Mapping[str, Any]] = ()
    """The validations so far, as returned by ``scheduling.validations.Validation.as_dict``."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The guard's statistics of the batches so far; empty if it is off."""
    lr_factor: float = 1.0
    """The guard's factor of the learning rate."""

    def write(self, folder: Path, files: Mapping[str, object]) -> None:
        """Write the state to the checkpoint, with sizes and checksums of its ``files``."""
        write_json(folder / STATE_FILE, {**asdict(self), "files": files})

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state of a checkpoint.

        Raises:
            ValueError: If this release cannot read it.
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
            raise ValueError(f"{STATE_FILE} is from another release: {e}") from e


def checkpoint_folder(run_dir: Path, policy_version: int) -> Path:
    """Return the folder of the checkpoint of a version."""
    return run_dir / "checkpoints" / f"v{policy_version:06d}"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run directory, so that only one process writes to it.

    This is a file lock of the operating system, which is released when the process ends.

    Raises:
        ConfigError: If another process holds the lock.
    """
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
            raise ConfigError(
                f"{run_dir} is in use: process {holder}, on this machine or on another one that "
                "shares the folder, runs it; wait until it ends, or interrupt it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
