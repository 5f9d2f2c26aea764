"""What this machine, and the cgroup this process is in, have for boxes right now.

Takes: ``/proc`` and ``/sys/fs/cgroup`` (versions 1 and 2). Gives: :class:`Machine`. Never: fails
where a file is not there; what is not limited is the machine's own.
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
    """What there is; all memory in bytes."""

    memory_bytes: int
    """In all: of the machine, or what the tightest cgroup allows."""
    available_bytes: int
    """Not used by anybody (or what is left in the tightest cgroup)."""
    num_cpus: float
    """Processors this process may use."""
    num_running: int
    """Threads that run or want to, on the whole machine."""
    held_by: str = ""
    """The cgroup that is tighter than the machine; empty when none is."""


def look() -> Machine:
    """Return what there is right now."""
    memory, available, held_by = *_memory(), ""
    for folder, limit, used in _limits():
        memory = min(memory, limit)
        if limit - used < available:
            available, held_by = max(0, limit - used), str(folder)
    return Machine(memory, available, _cpus(), _running(), held_by)


def free_disk_bytes() -> int:
    """Return what is free where temporary files go."""
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
        # In a container the path may be the host's, and what is mounted is the container's own.
        for folder in (root / path.lstrip("/"), root):
            if (folder / "cgroup.procs").exists():
                return folder
    return None


def _limits() -> Iterator[tuple[Path, int, int]]:
    """Yield folder, memory limit and memory used of the cgroups around this process."""
    own = own_group("memory")
    for folder in (own, *own.parents) if own else ():
        if not folder.is_relative_to(_MOUNT):
            return
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED and used is not None:
            yield folder, limit, max(0, used - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Return how much of what a cgroup uses is file cache that the kernel gives up at once."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in {"total_inactive_file", "inactive_file"} and value.isdigit():
            return int(value)
    return 0


def _memory() -> tuple[int, int]:
    """Return the machine's memory, and what of it is available."""
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
