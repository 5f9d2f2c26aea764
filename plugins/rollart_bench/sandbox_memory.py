"""How much memory a box takes on the host.

Takes: the process id of what runs in it. Gives: bytes, each page shared by n processes counted as
its nth part. Never: counts what boxes have in common (an engine, this process).
"""

from __future__ import annotations

import os
from pathlib import Path

_COMMON = frozenset({"dockerd", "containerd", "systemd", "init"})


def memory_bytes(pid: int) -> int | None:
    """Return the memory of a process and of those above it that are there for it alone.

    These are bubblewrap's monitor, or the shim of a container. None where the system (or the
    process's owner) does not say.
    """
    total = 0
    while pid > 1 and pid != os.getpid():
        folder = Path("/proc", str(pid))
        try:
            name = (folder / "comm").read_text().strip()
            if name in _COMMON:
                break
            total += _pss(folder)
            pid = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return total


def _pss(folder: Path) -> int:
    for line in (folder / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{folder} has no Pss")
