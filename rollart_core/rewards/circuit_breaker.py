"""A circuit breaker: stops the calls to a failing backend for some time.

    closed --failures in a row--> open --after open_s--> one trial --well--> closed
                                    ^                        |
                                    +--------- badly --------+

Takes: the outcomes of calls, and the time. Gives: the wait before the next call. Never: reads a
clock.
"""

from __future__ import annotations

from typing import Literal

Change = Literal["opened", "closed"]
"""The state change after an outcome."""


class CircuitBreaker:
    """The state of one backend. See the module docstring.

    Args:
        failures: Consecutive failures after which it opens.
        open_s: Seconds until it allows one trial.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._in_a_row = 0
        self._opens_at: float | None = None
        self._on_trial = False

    @property
    def closed(self) -> bool:
        """Whether calls are allowed."""
        return self._opens_at is None

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a call may be made. 0 means now.

        During a trial the wait is unknown. The result is then the time until the next check.
        """
        if self._opens_at is None:
            return 0.0
        if self._on_trial:
            return self._open_s
        return max(0.0, self._opens_at - now_s)

    def begin(self) -> bool:
        """Record the start of a call. Return whether it is the trial of an open breaker."""
        self._on_trial = not self.closed
        return self._on_trial

    def succeeded(self, *, trial: bool) -> Change | None:
        """Record a success. A call from before the breaker opened does not close it."""
        if not self.closed and not trial:
            return None
        self._in_a_row, self._opens_at, self._on_trial = 0, None, False
        return "closed" if trial else None

    def failed(self, now_s: float, *, trial: bool) -> Change | None:
        """Record a failure."""
        self._in_a_row += 1
        if self.closed and self._in_a_row < self._limit:
            return None
        was_closed = self.closed
        if was_closed or trial:
            self._opens_at, self._on_trial = now_s + self._open_s, False
        return "opened" if was_closed else None

    def given_up(self, *, trial: bool) -> None:
        """Record a cancelled call. If it was the trial, the next call is the trial."""
        if trial:
            self._on_trial = False
