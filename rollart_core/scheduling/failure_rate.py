"""The failure rate of the last attempts, over all environments and for each environment.

Takes: one attempt at a time. Gives: a rate, and a reason that the user can act on. Never: decides
that a run stops; the scheduler does.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from rollart_core.errors import first_line
from rollart_core.types import Failure, FailureKind

MAX_REPLAYS: Final = 16
"""The maximum number of replays of one task after infrastructure failures."""


@dataclass(slots=True)
class RetryBudget:
    """Counts the retries and the replays of one task.

    A replay after an infrastructure failure does not use the budget of retries.
    """

    num_retries: int = 0
    num_replays: int = 0

    def take(self, failure: Failure, max_retries: int) -> bool:
        """Count a new attempt after ``failure``, and return whether it is allowed."""
        if failure.is_infrastructure:
            self.num_replays += 1
            return self.num_replays <= MAX_REPLAYS
        self.num_retries += 1
        return self.num_retries <= max_retries


class Attempts:
    """The last attempts of a run, and the last attempts of each environment.

    Each environment has its own window, so an environment that always fails is detected even if
    only few attempts use it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._all = AttemptWindow(size)
        self._by_env: dict[str, AttemptWindow] = {}

    def add(self, env_id: str, failure: Failure | None) -> None:
        """Add an attempt in an environment; ``failure`` is None if it finished.

        Cancelled attempts and attempts that ended with an infrastructure failure are not counted.
        """
        if failure and (failure.is_infrastructure or failure.kind is FailureKind.CANCELLED):
            return
        self._all.add(failure)
        self._by_env.setdefault(env_id, AttemptWindow(self._size)).add(failure)

    def excess(self, limit: float) -> str | None:
        """Return which full window has a failure rate above ``limit``, and why; None if none."""
        one_of_several = self._by_env if len(self._by_env) > 1 else {}
        for env_id, window in one_of_several.items():
            if window.full and window.rate > limit:
                return window.reason(limit, f" in {env_id}")
        if self._all.full and self._all.rate > limit:
            return self._all.reason(limit)
        return None


class AttemptWindow:
    """The last ``size`` attempts and their failures."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._attempts: deque[tuple[FailureKind, str] | None] = deque()
        self._num_failed = 0

    def add(self, failure: Failure | None) -> None:
        """Add an attempt; ``failure`` is None if it finished."""
        self._attempts.append((failure.kind, first_line(failure.message)) if failure else None)
        self._num_failed += failure is not None
        if len(self._attempts) > self._size:
            self._num_failed -= self._attempts.popleft() is not None

    @property
    def full(self) -> bool:
        """True if the window holds ``size`` attempts."""
        return len(self._attempts) == self._size

    @property
    def rate(self) -> float:
        """The share of the attempts that failed."""
        return self._num_failed / len(self._attempts)

    def reason(self, limit: float, where: str = "") -> str:
        """Return a sentence with the rate and the most common failure."""
        failures = Counter(a for a in self._attempts if a is not None)
        (kind, message), n = failures.most_common(1)[0]
        return (
            f"{self.rate:.0%} of the last {self._size} attempts{where} failed (limit {limit:.0%}); "
            f"most often, {n} times, {kind}: {message}"
        )
