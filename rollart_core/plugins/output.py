"""What a plugin prints while it is loaded goes to stderr: stdout is what a script reads.

Takes: a block of code that runs code of plugins. Gives: a block in which stdout, as Python code of
this thread sees it, writes to stderr. Never: diverts another thread, a child process or anything
that is printed later, also not through an object that was made from stdout in the block.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_lock = threading.Lock()
_num_open = 0
"""Blocks that are open, in all threads."""


class _Depth(threading.local):
    value = 0
    """Blocks that this thread is in."""


_depth = _Depth()


class _Stream:
    """A stream whose writes go to another one while the writing thread is in a block.

    Args:
        stream: The real one, also for everything but writing.
        diverted: Where diverted writes go: the name of an attribute of ``sys.stderr``, or of
            nothing for itself.
    """

    def __init__(self, stream: Any, diverted: str = "") -> None:
        self._stream = stream
        self._diverted = diverted

    def write(self, data: Any) -> int:
        """Write to where this thread's output belongs."""
        target = self._target()
        if target is None:  # a process without stderr
            return len(data)
        written: int = target.write(data)
        return written

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush where this thread's output belongs."""
        target = self._target()
        if target is not None:
            target.flush()

    @property
    def buffer(self) -> Any:
        """The binary stream below, diverted as well."""
        return _Stream(self._stream.buffer, "buffer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _target(self) -> Any:
        if not _depth.value:
            return self._stream
        return getattr(sys.stderr, self._diverted, None) if self._diverted else sys.stderr


@contextmanager
def output_of_plugins() -> Iterator[None]:
    """Divert to stderr what this thread prints, for as long as the block takes.

    Another thread may open a block meanwhile, or put its own object in the place of
    ``sys.stdout``; whichever ends first, no output of the program is lost.
    """
    _open()
    try:
        yield
    finally:
        _close()


def _open() -> None:
    global _num_open
    with _lock:
        _num_open += 1
        if sys.stdout is not None and not isinstance(sys.stdout, _Stream):
            sys.stdout = cast(TextIO, _Stream(sys.stdout))
    _depth.value += 1


def _close() -> None:
    """End the block; what somebody else has put in the place of stdout meanwhile stays there."""
    global _num_open
    _depth.value -= 1
    with _lock:
        _num_open -= 1
        if _num_open == 0 and isinstance(sys.stdout, _Stream):
            sys.stdout = sys.stdout._stream
