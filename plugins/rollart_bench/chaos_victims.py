"""Find the processes and files of a run from outside: the victims, and what is left.

Takes: a mark that all processes of a run inherit in their environment. Gives: their ids by role,
and what is left behind. Never: queries the run; Linux's /proc is sufficient.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollart_core.runtime.process import PART_VARIABLE
from rollart_plugins.serverless.config import WORKER

MARK_VARIABLE = "ROLLART_CHAOS"
"""A variable in the environment of every process that the benchmark starts, and their children."""
MEMORY = Path("/dev/shm")
_OWNER = re.compile(r"(?:^|[^0-9A-Za-z])(\d+)(?![0-9A-Za-z])")
"""The first integer in the name of a file in shared memory: the id of the process that made it."""


def _in_memory() -> frozenset[str]:
    return frozenset(os.listdir(MEMORY)) if MEMORY.is_dir() else frozenset()


@dataclass(slots=True)
class Watched:
    """The past and present processes of one benchmark."""

    mark: str
    seen: set[int] = field(default_factory=set)
    """All process ids that ever had the mark."""
    in_memory_before: frozenset[str] = field(default_factory=_in_memory)
    """Files of others in shared memory. A number in a name can equal the id of one of ours."""

    def alive(self) -> list[int]:
        """Return the ids of the living ones."""
        found = with_variable(MARK_VARIABLE, self.mark)
        self.seen |= set(found)
        return found

    def parts(self, run_dir: Path) -> dict[str, list[int]]:
        """Return the ids of a run's workers by name, which is the name of their log file."""
        logs = str(run_dir / "logs")
        found: dict[str, list[int]] = {}
        for pid in self.alive():
            folder, _, file = _output_of(pid).rpartition("/")
            if folder == logs:
                found.setdefault(file.removesuffix(".log"), []).append(pid)
        return found

    def reward_workers(self) -> list[int]:
        """Return the ids of the worker processes of the reward backend `pool`."""
        wanted = f"{PART_VARIABLE}={WORKER} ".encode()
        return [
            pid
            for pid in self.alive()
            if any(one.startswith(wanted) for one in _read(pid, "environ").split(b"\0"))
        ]

    def shared_files(self) -> list[str]:
        """Return the files in shared memory that any of them made and that still exist."""
        owners = {name: _OWNER.search(name) for name in _in_memory() - self.in_memory_before}
        return sorted(n for n, owner in owners.items() if owner and int(owner[1]) in self.seen)


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of living processes that were started with a variable of this value."""
    wanted = f"{name}={value}".encode()
    return [pid for pid in _all_pids() if wanted in _read(pid, "environ").split(b"\0")]


def files_in(folder: Path) -> list[str]:
    """Return all files and sockets in a folder and its subfolders."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if it has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _output_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
