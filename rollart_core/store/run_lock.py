"""A run directory has one process at a time that writes to it.

Takes: a run directory. Gives: a lock for as long as a ``with`` block lasts. Never: outlives its
process: it is the operating system's lock on a file, whatever stays written in it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart_core.errors import ConfigError

FILE = "lock"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run directory.

    Raises:
        ConfigError: When another process holds it.
    """
    descriptor = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
            raise ConfigError(
                f"{run_dir} is in use: process {holder} of this machine, or of one that shares the "
                "folder, is running it; wait for its end or interrupt it first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
