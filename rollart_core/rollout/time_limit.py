"""A time limit for calls that usually end long before it.

Takes: seconds, and the name of the call. Gives: a block that is cancelled when its time is up, and
then raises a DeadlineFailure. Never: sets an event loop timer for each long call. Such timers cost
about as much as the other bookkeeping of a turn, so long limits are checked together at intervals.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

from rollart_core.errors import DeadlineFailure

LOOK_EVERY_S: Final = 0.2
"""Interval between checks; a long limit may be late by this many seconds."""
LONG_S: Final = 4.0
"""Limits of at least this many seconds are checked at intervals; shorter ones have a timer."""


class TimeLimit:
    """A context manager that limits a block: ``async with TimeLimit("env.step", 30.0):``.

    Args:
        what: The name of the limited call, such as ``"env.step"``.
        seconds: The limit in seconds.
        reason: The message of the failure. Default: that the call took longer than the limit.
    """

    __slots__ = ("_before", "_expired", "_reason", "_seconds", "_task", "_timer", "_what", "ends")

    def __init__(self, what: str, seconds: float, reason: str = "") -> None:
        self._what = what
        self._seconds = seconds
        self._reason = reason
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        loop = asyncio.get_running_loop()
        self.ends = loop.time() + self._seconds
        """The deadline, on the loop's clock."""
        self._timer: _Watch | asyncio.TimerHandle
        if self._seconds >= LONG_S:
            self._timer = _watch(loop)
            self._timer.add(self)
        else:
            self._timer = loop.call_at(self.ends, self.expire)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(self._timer, _Watch):
            self._timer.discard(self)
        else:
            self._timer.cancel()
        # If another caller has cancelled the task too, the block ends as cancelled.
        if not self._expired or self._task.uncancel() > self._before:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            reason = self._reason or f"{self._what} took longer than {self._seconds:g} s"
            raise DeadlineFailure(reason, boundary=self._what) from error

    def expire(self) -> None:
        """Cancel the block."""
        self._expired = True
        self._task.cancel()


class _Watch:
    """The active long limits of one loop."""

    def __init__(self) -> None:
        self._limits: set[TimeLimit] = set()
        self._looks = False

    def add(self, limit: TimeLimit) -> None:
        self._limits.add(limit)
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def discard(self, limit: TimeLimit) -> None:
        self._limits.discard(limit)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for limit in [limit for limit in self._limits if limit.ends <= now]:
            self._limits.discard(limit)
            limit.expire()
        self._looks = bool(self._limits)
        if self._looks:
            loop.call_later(LOOK_EVERY_S, self._look)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()


def _watch(loop: asyncio.AbstractEventLoop) -> _Watch:
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = _Watch()
    return watch
