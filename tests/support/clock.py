"""Clocks of event loops that tests move, so that no deadline depends on the pace of the machine.

A call that must not end in time gets a limit that nothing healthy reaches. When the test has seen
that the call is under way, :func:`pass_s` lets the limit pass at once. A test without threads,
processes and sockets runs under :func:`run_virtual`, where no time passes while there is work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        self._look, selector.select = selector.select, self._jump

    def time(self) -> float:
        return self._now_s

    def _jump(self, timeout: float | None = None) -> Any:
        ready = self._look(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return self._look(None)
        self._now_s += timeout
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, on a :class:`VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def pass_s(seconds: float) -> None:
    """Move the clock of the running event loop on: timers that are due by then run next."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
