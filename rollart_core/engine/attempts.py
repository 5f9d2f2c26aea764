"""The last attempts: what share of them failed, and how.

Takes: one attempt at a time. Gives: a rate, and a reason a person can act on. Never: decides that
a run stops; the scheduler does.
"""

from __future__ import annotations

from collections import Counter, deque

from rollart_core.errors import first_line
from rollart_core.types import Failure, FailureKind


class AttemptWindow:
    """The last ``size`` attempts: how many failed, and how."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._attempts: deque[tuple[FailureKind, str] | None] = deque()
        self._num_failed = 0

    def add(self, failure: Failure | None) -> None:
        """Add an attempt; None when it finished."""
        self._attempts.append((failure.kind, first_line(failure.message)) if failure else None)
        self._num_failed += failure is not None
        if len(self._attempts) > self._size:
            self._num_failed -= self._attempts.popleft() is not None

    @property
    def full(self) -> bool:
        """True once ``size`` attempts were seen."""
        return len(self._attempts) == self._size

    @property
    def rate(self) -> float:
        """Share of them that failed."""
        return self._num_failed / len(self._attempts)

    def reason(self, limit: float) -> str:
        """Say the rate and the most common failure."""
        failures = Counter(a for a in self._attempts if a is not None)
        (kind, message), n = failures.most_common(1)[0]
        return (
            f"{self.rate:.0%} of the last {self._size} attempts failed (limit {limit:.0%}); "
            f"most often, {n} times, {kind}: {message}"
        )
