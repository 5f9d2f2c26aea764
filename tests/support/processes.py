"""Processes of other parents, which the test cannot wait for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from support.pace import wait_until


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that only its parent has not reaped has."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_gone(pid: int) -> None:
    """Wait until a process has ended.

    Raises:
        TimeoutError: If it does not.
    """
    wait_until(lambda: not is_running(pid), f"the end of process {pid}")
