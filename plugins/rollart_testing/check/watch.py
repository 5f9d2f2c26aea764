"""A watch that another process can read, even while the watched one hangs with Python's lock held.

Takes: the calls of a child, as marks in a small shared file. Gives: the call it is in, and since
when. Never: waits.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from rollart_testing.play import Watch

_FORM = struct.Struct("d24s")


class SharedWatch(Watch):
    """Writes what it times to a file.

    Args:
        path: A file made by :meth:`WatchFile.create`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    def mark(self, call: str, began: float) -> None:
        """Note that ``call`` begins."""
        _FORM.pack_into(self._memory, 0, began, call.encode()[:24])


class WatchFile:
    """The reader's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_FORM.size))

    def call(self) -> tuple[str, float] | None:
        """Return the call under way and when it began (monotonic seconds); None between calls."""
        began, call = _FORM.unpack(self.path.read_bytes())
        return (call.rstrip(b"\0").decode(errors="replace"), began) if began else None
