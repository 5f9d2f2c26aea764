"""The processes of the sandbox: find their owners, and end them.

Takes: process ids. Gives: answers from ``/proc``. Never: raises for a process that has ended.
"""

from __future__ import annotations

import collections
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Set

MARK = "ROLLART_EXEC"


def children() -> List[int]:
    """Return the process ids of this process's children."""
    try:
        found: List[int] = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
        return found
    except OSError:
        me = os.getpid()
        return [pid for pid, parent in parents().items() if parent == me]


def parents() -> Dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                pass
    return found


def descendants(top: List[int]) -> Set[int]:
    """Return these processes and all their descendants."""
    below: Dict[int, List[int]] = collections.defaultdict(list)
    for pid, parent in parents().items():
        below[parent].append(pid)
    found: Set[int] = set()
    left = list(top)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += below[pid]
    return found


def marked(pid: int, tokens: Set[bytes]) -> bool:
    """Return whether a process was started with the mark of one of these commands."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read(1 << 20).split(b"\0")
    except OSError:
        return False
    mark = MARK.encode() + b"="
    return any(e.startswith(mark) and e[len(mark) :] in tokens for e in entries)


def signal_one(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def die_first(pid: int) -> None:
    """Let the kernel kill this command before the agent if memory runs out."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def lower(which: int, value: int) -> None:
    """Lower a limit for this process and all its future children."""
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))
