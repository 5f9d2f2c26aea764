"""The resources for sandboxes on this machine, and in this process's cgroup.

Takes: ``/proc`` and ``/sys/fs/cgroup`` (versions 1 and 2). Gives: :class:`Machine`. Never: fails if
a file is missing. Without a limit, the machine's own value counts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_MOUNT: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of the machine; all memory is in bytes."""

    memory_bytes: int
    """Total memory of the machine, or the limit of the tightest cgroup."""
    available_bytes: int
    """Available memory of the machine, or what is left in the tightest cgroup."""
    num_cpus: float
    """CPUs that this process may use."""
    num_running: int
    """Threads that run or are ready to run, on the whole machine."""
    held_by: str = ""
    """The cgroup that limits memory below the machine's; empty if there is none."""


def look() -> Machine:
    """Return the current resources."""
    memory, available, held_by = *_memory(), ""
    for folder, limit, used in _limits():
        memory = min(memory, limit)
        if limit - used < available:
            available, held_by = max(0, limit - used), str(folder)
    return Machine(memory, available, _cpus(), _running(), held_by)


def free_disk_bytes() -> int:
    """Return the free disk space for temporary files."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def own_group(controller: str) -> Path | None:
    """Return the folder of this process's cgroup for a controller, of version 1 or 2."""
    lines = _read(_PROC / "self/cgroup").splitlines()
    for wanted in (controller, ""):
        for line in lines:
            number, names, path = line.split(":", 2)
            if wanted in names.split(",") and (wanted or number == "0"):
                return _folder(names, path)
    return None


def _folder(names: str, path: str) -> Path | None:
    roots = [_MOUNT / names, *(_MOUNT / name for name in names.split(","))]
    if not names:
        roots = [_MOUNT, _MOUNT / "unified"]
    for root in roots:
        # In a container the path may be the host's, while the container's own cgroup is mounted.
        for folder in (root / path.lstrip("/"), root):
            if (folder / "cgroup.procs").exists():
                return folder
    return None


def _limits() -> Iterator[tuple[Path, int, int]]:
    """Yield folder, memory limit and used memory of the cgroups around this process."""
    own = own_group("memory")
    for folder in (own, *own.parents) if own else ():
        if not folder.is_relative_to(_MOUNT):
            return
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED and used is not None:
            yield folder, limit, max(0, used - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Return how much of a cgroup's memory is file cache that the kernel can free immediately."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in {"total_inactive_file", "inactive_file"} and value.isdigit():
            return int(value)
    return 0


def _memory() -> tuple[int, int]:
    """Return the machine's total and available memory."""
    found = {}
    for line in _read(_PROC / "meminfo").splitlines():
        key, _, rest = line.partition(":")
        found[key] = int(rest.split()[0]) * 1024
    if "MemTotal" not in found:  # not Linux
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages, pages
    return found["MemTotal"], found.get("MemAvailable", found["MemTotal"])


def _cpus() -> float:
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    folder = own_group("cpu")
    if folder is None:
        return cpus
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    quota = quota or _read(folder / "cpu.cfs_quota_us").strip()
    period = period or _read(folder / "cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if int(quota) > 0:
            return min(cpus, int(quota) / int(period))
    return cpus


def _running() -> int:
    for line in _read(_PROC / "stat").splitlines():
        if line.startswith("procs_running "):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
