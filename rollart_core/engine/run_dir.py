"""The run directory: what lies where, and what a checkpoint knows besides weights.

Takes: a config. Gives: paths. Never: overwrites a run; a new one gets a new name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollart_core.engine.tasks import TaskSourceState
from rollart_core.errors import ConfigError
from rollart_core.types import Task


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


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file beside and rename it, so that a reader never sees half of it."""
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(beside, path)


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint knows besides the weights."""

    policy_version: int
    train_step: int
    task_source: TaskSourceState
    open_tasks: tuple[Task, ...]
    """Each task that was dispatched and not yet trained or dropped."""
    train_wall_s: float

    def write(self, folder: Path) -> None:
        """Put it beside the weights."""
        write_json(folder / "run_state.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read it back."""
        content = json.loads((folder / "run_state.json").read_text(encoding="utf-8"))
        source = content.pop("task_source")
        return cls(
            **{**content, "open_tasks": _tasks(content["open_tasks"])},
            task_source=TaskSourceState(source["position"], _tasks(source["requeued"])),
        )


def _tasks(plain: Iterable[Mapping[str, Any]]) -> tuple[Task, ...]:
    return tuple(Task(**fields) for fields in plain)


def checkpoint_folder(run_dir: Path, policy_version: int) -> Path:
    """Return where the checkpoint of a version lies."""
    return run_dir / "checkpoints" / f"v{policy_version:06d}"


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest complete checkpoint.

    Raises:
        ConfigError: When there is none.
    """
    found = sorted((run_dir / "checkpoints").glob("v*/run_state.json"))
    if not found:
        raise ConfigError(f"{run_dir} holds no checkpoint to resume from")
    return found[-1].parent
