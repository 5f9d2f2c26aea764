"""The last attempts: what share of them failed, and how; of all, and of each environment.

Takes: one attempt at a time. Gives: a rate, and a reason a person can act on. Never: decides that
a run stops; the scheduler does.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from rollart_core.errors import first_line
from rollart_core.types import Failure, FailureKind

MAX_REPLAYS: Final = 16
"""How often one task is replayed after losses of infrastructure."""


@dataclass(slots=True)
class RetryBudget:
    """How often one task has been attempted again, and why.

    A replay after a loss of infrastructure does not use the budget of retries.
    """

    num_retries: int = 0
    num_replays: int = 0

    def take(self, failure: Failure, max_retries: int) -> bool:
        """Return whether the task may be attempted again after ``failure``, and count that."""
        if failure.is_infrastructure:
            self.num_replays += 1
            return self.num_replays <= MAX_REPLAYS
        self.num_retries += 1
        return self.num_retries <= max_retries


class Attempts:
    """The last attempts of a run, and those of each environment, so that none hides behind others.

    Each environment has a window of its own: one that always fails is seen, however few of the
    attempts are its own.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._all = AttemptWindow(size)
        self._by_env: dict[str, AttemptWindow] = {}

    def add(self, env_id: str, failure: Failure | None) -> None:
        """Add an attempt in an environment; None when it finished.

        Cancelled attempts, and those that a loss of infrastructure ended, are left out.
        """
        if failure and (failure.is_infrastructure or failure.kind is FailureKind.CANCELLED):
            return
        self._all.add(failure)
        self._by_env.setdefault(env_id, AttemptWindow(self._size)).add(failure)

    def excess(self, limit: float) -> str | None:
        """Say where more than ``limit`` of a full window failed, and how; None where nothing is."""
        one_of_several = self._by_env if len(self._by_env) > 1 else {}
        for env_id, window in one_of_several.items():
            if window.full and window.rate > limit:
                return window.reason(limit, f" in {env_id}")
        if self._all.full and self._all.rate > limit:
            return self._all.reason(limit)
        return None


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

    def reason(self, limit: float, where: str = "") -> str:
        """Say the rate and the most common failure."""
        failures = Counter(a for a in self._attempts if a is not None)
        (kind, message), n = failures.most_common(1)[0]
        return (
            f"{self.rate:.0%} of the last {self._size} attempts{where} failed (limit {limit:.0%}); "
            f"most often, {n} times, {kind}: {message}"
        )
