"""What does a plugin leave open in this process, round after round?

Takes: what opens, plays and closes a plugin once. Gives: nothing when all is closed again, else a
failed check that names what is left. Never: takes a thing of another part of the process, which
began once and stays, for one that each round leaves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollart_testing.results import expect

GRACE_S: Final = 5.0
"""Seconds that what was told to end has to do so, after each series of rounds."""
_NUM_NAMED: Final = 3
_NUM_SERIES: Final = 2

Census = dict[str, dict[int, str]]
"""By kind, what this process has: its number (of a thread, process or file) and its name."""


def expect_nothing_left(once: Callable[[], object], num_rounds: int, rounds: str) -> str | None:
    """Go several rounds, and expect that they leave no thread, process or file.

    What grows by less than one a round is a pool that fills up. What grows in one series of rounds
    and not in the next is somebody else's: a thread pool or a loop that this process began beside.

    Args:
        once: One round; it has been gone through before, so that what opens once is open.
        num_rounds: Rounds of a series.
        rounds: What they are, for the reason, such as ``"5 times open, play, close"``.

    Returns:
        What could not be seen here; None when everything could.

    Raises:
        CheckFailed: Something was left, in every series.
    """
    for _ in range(_NUM_SERIES):
        before = census()
        for _ in range(num_rounds):
            once()
        left = _left(before, num_rounds)
        if not left:
            break
    expect(not left, f"after {rounds}: {' and '.join(left)}")
    sees_all = Path("/proc/self/task").exists()
    return None if sees_all else "only threads: this system does not list the others"


def _left(before: Census, num_rounds: int) -> list[str]:
    """Return what grew and did not go within the grace, each in words."""
    deadline = time.monotonic() + GRACE_S
    while left := _grown(before, census(), num_rounds):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)  # a thread or process that was told to end may take a moment
    return left


def _grown(before: Census, now: Census, num_rounds: int) -> list[str]:
    left = []
    for kind, had in before.items():
        has = now.get(kind, {})
        if (more := len(has) - len(had)) >= num_rounds:
            names = list(dict.fromkeys(name for number, name in has.items() if number not in had))
            such = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
            left.append(f"{more} {kind} more ({such})")
    return left


def census() -> Census:
    """Return the threads, child processes and open files of this process."""
    names = {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None}
    found: Census = {"threads": dict(names)}
    with suppress(OSError):
        threads = {int(task.name): task for task in Path("/proc/self/task").iterdir()}
        children = [pid for task in threads.values() for pid in _children(task)]
        files = map(int, os.listdir("/proc/self/fd"))
        found |= {
            "threads": {number: names.get(number, "of no Python") for number in threads},
            "processes": {pid: _first_line(Path(f"/proc/{pid}/comm"), "gone") for pid in children},
            "open files": {number: _target(number) for number in files},
        }
    return found


def _children(task: Path) -> list[int]:
    """Return the processes that a thread began; none when the thread is gone by now."""
    return list(map(int, _first_line(task / "children", "").split()))


def _first_line(path: Path, otherwise: str) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return otherwise


def _target(number: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return "gone"
