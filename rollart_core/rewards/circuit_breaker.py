"""A circuit breaker: a backend that keeps failing is left alone for a while.

    closed --failures in a row--> open --after open_s--> one trial --well--> closed
                                    ^                        |
                                    +--------- badly --------+

Takes: how calls went, and the time. Gives: how long to wait before the next. Never: reads a clock.
"""

from __future__ import annotations

from typing import Literal

Change = Literal["opened", "closed"]
"""What an outcome has changed, where it has changed something."""


class CircuitBreaker:
    """See the module.

    Args:
        failures: In a row, after which it opens.
        open_s: Seconds until it lets one trial through.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._in_a_row = 0
        self._opens_at: float | None = None
        self._on_trial = False

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self._opens_at is None

    def wait_s(self, now_s: float) -> float:
        """Return after how many seconds a call may be made; 0: now.

        While a trial is under way nobody knows: the answer is when to ask again.
        """
        if self._opens_at is None:
            return 0.0
        if self._on_trial:
            return self._open_s
        return max(0.0, self._opens_at - now_s)

    def begin(self) -> bool:
        """A call is made; return whether it is the trial of an open breaker."""
        self._on_trial = not self.closed
        return self._on_trial

    def succeeded(self, *, trial: bool) -> Change | None:
        """A call went well. One that was made before the breaker opened says nothing of now."""
        if not self.closed and not trial:
            return None
        self._in_a_row, self._opens_at, self._on_trial = 0, None, False
        return "closed" if trial else None

    def failed(self, now_s: float, *, trial: bool) -> Change | None:
        """A call went badly."""
        self._in_a_row += 1
        if self.closed and self._in_a_row < self._limit:
            return None
        was_closed = self.closed
        if was_closed or trial:
            self._opens_at, self._on_trial = now_s + self._open_s, False
        return "opened" if was_closed else None

    def given_up(self, *, trial: bool) -> None:
        """A call was cancelled and says nothing; if it was the trial, the next one is."""
        if trial:
            self._on_trial = False
