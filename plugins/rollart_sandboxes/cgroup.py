"""A cgroup for one sandbox, of version 1 or 2, if this process may create one.

Takes: limits. Gives: a group that enforces the limits it can, and reports which. Never: fails a
sandbox because there is no cgroup; rlimits replace it, as :attr:`Cgroup.held` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from pathlib import Path
from typing import Final

_PREFIX: Final = "rollart-"
_MOUNT: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_PERIOD_US: Final = 100_000
_TRIES: Final = 100


class Cgroup:
    """The folders of one sandbox's group (several with version 1), and the limits they enforce."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self.held = frozenset(folders)
        """The limited resources: ``memory``, ``pids``, ``cpu``."""

    @classmethod
    def make(cls, *, memory_bytes: int, num_pids: int, cpus: float | None) -> Cgroup:
        """Create a group under this process's own; it has no folders if that is not possible."""
        name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:16]}"
        quota = int(cpus * _PERIOD_US) if cpus is not None else None
        wanted = {
            "memory": (("memory.limit_in_bytes", memory_bytes), ("memory.max", memory_bytes)),
            "pids": (("pids.max", num_pids), ("pids.max", num_pids)),
        }
        if quota is not None:
            wanted["cpu"] = (("cpu.cfs_quota_us", quota), ("cpu.max", quota))
        folders = {}
        for controller, (first, second) in wanted.items():
            parent, is_v1 = _own_group(controller)
            key, value = first if is_v1 else second
            if parent is not None and _limit(parent / name, key, value):
                folders[controller] = parent / name
                _forget_the_dead(parent)
        return cls(folders)

    @property
    def folders(self) -> list[Path]:
        """The folders of the group."""
        return sorted(set(self._folders.values()))

    def add(self, pid: int) -> None:
        """Put a process in the group; its children are in it too."""
        for controller, folder in list(self._folders.items()):
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                self.held -= {controller}

    async def remove(self) -> None:
        """Remove the group, once the last process of the sandbox has ended."""
        for folder in set(self._folders.values()):
            for _ in range(_TRIES):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        self._folders = {}


def memory_group(pid: int, holding: str) -> Path | None:
    """Return the folder of the group that counts a process's memory, of version 1 or 2.

    Args:
        pid: The process.
        holding: Text that the group's name contains, such as a container's id. If the process is in
            another group, None is returned (the pid may belong to another machine).
    """
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if "memory" in names.split(",") or number == "0":
                for root in (_MOUNT / names, _MOUNT / "memory", _MOUNT):
                    folder = root / path.lstrip("/")
                    if holding in path and memory_used_bytes(folder) is not None:
                        return folder
    return None


def memory_used_bytes(group: Path) -> int | None:
    """Return the memory that a group uses now; None if there is no such group."""
    for key in ("memory.current", "memory.usage_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((group / key).read_text())
    return None


def end_group(group: Path) -> bool:
    """Kill all processes in a group; return False if that is not permitted."""
    try:
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _own_group(controller: str) -> tuple[Path | None, bool]:
    """Return the folder of this process's group for a controller, and whether it is version 1."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                folder = _MOUNT / names / path.lstrip("/")
                if not folder.is_dir():
                    folder = _MOUNT / controller / path.lstrip("/")
                return (folder, True) if folder.is_dir() else (None, True)
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = _MOUNT / line[3:].lstrip("/")
                return (folder, False) if (folder / "cgroup.procs").exists() else (None, False)
    return None, False


def _forget_the_dead(parent: Path) -> None:
    """Remove the groups of runs that were killed; their sandboxes have ended with them."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _limit(folder: Path, key: str, value: int) -> bool:
    """Create the group and set one limit; return False, and leave no group, if not permitted."""
    controller = key.partition(".")[0]
    fresh = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        if not (folder / key).exists():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        # In a cgroup filesystem a write cannot create a file: this fails if the key is missing.
        text = f"{value} {_PERIOD_US}" if key == "cpu.max" else str(value)
        with (folder / key).open("r+") as file:
            file.write(text)
    except OSError:
        if fresh:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return False
    return True
