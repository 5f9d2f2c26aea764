"""Ownership marks of a process and of a machine, for items that outlive a killed owner.

Takes: nothing. Gives: marks with which garbage collection detects dead owners. Never: treats a
process as dead that it cannot see (of another machine, or of another process namespace).
"""

from __future__ import annotations

import contextlib
import os
import platform
import zlib
from functools import cache
from pathlib import Path
from typing import Final

OWNER_LABEL: Final = "rollart.owner"
HOST_LABEL: Final = "rollart.host"
LEDGER_LABEL: Final = "rollart.ledger"


def owner_mark(pid: int | None = None) -> str:
    """Return ``pid:start time`` of a process, by default this one; no other process has it."""
    number = os.getpid() if pid is None else pid
    return f"{number}:{_started(number)}"


def is_alive(mark: str) -> bool:
    """Return whether the process with this ``mark`` is alive; True if the mark is invalid."""
    pid, _, started = mark.partition(":")
    if not pid.isdigit() or not started.isdigit():
        return True
    return _started(int(pid)) == int(started)


def stamp() -> str:
    """Return this process's mark for the name of a file, after ``rollart-KIND-``."""
    return f"{_host_stamp()}-{owner_mark().replace(':', '-')}-"


def is_left(name: str) -> bool:
    """Return whether a name has the stamp of a process of this machine that has ended."""
    parts = name.split("-")
    if len(parts) < 5 or parts[2] != _host_stamp():
        return False
    return not is_alive(f"{parts[3]}:{parts[4]}")


def labels(line: str = "") -> dict[str, str]:
    """Return the labels of a sandbox's container.

    Args:
        line: The name of the sandbox's line in the ledger; empty if it has none.
    """
    return {OWNER_LABEL: owner_mark(), HOST_LABEL: host_mark(), LEDGER_LABEL: line}


def is_orphan(found: dict[str, str]) -> bool:
    """Return whether these are labels of a sandbox of this machine whose owner is gone."""
    if found.get(HOST_LABEL) != host_mark() or OWNER_LABEL not in found:
        return False
    return not is_alive(found[OWNER_LABEL])


@cache
def host_mark() -> str:
    """Return a mark of this boot of this machine, and of this process namespace."""
    boot, space = platform.node(), "0"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{boot}/{space}"


def _host_stamp() -> str:
    return f"{zlib.crc32(host_mark().encode()):08x}"


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])
