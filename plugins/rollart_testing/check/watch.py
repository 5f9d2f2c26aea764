"""A call timer that another process can read, even if the timed process hangs with the GIL held.

Takes: the calls of a child, as marks in a small shared file. Gives: the current call and its start
time. Never: waits.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from rollart_testing.play import Watch

_FORM = struct.Struct("d24s")


class SharedWatch(Watch):
    """Writes the current call to a file.

    Args:
        path: A file created by :meth:`WatchFile.create`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    def mark(self, call: str, began: float) -> None:
        """Record the start of ``call``."""
        _FORM.pack_into(self._memory, 0, began, call.encode()[:24])


class WatchFile:
    """The reader's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_FORM.size))

    def call(self) -> tuple[str, float] | None:
        """Return the current call and its start (monotonic seconds); None between calls."""
        began, call = _FORM.unpack(self.path.read_bytes())
        return (call.rstrip(b"\0").decode(errors="replace"), began) if began else None
