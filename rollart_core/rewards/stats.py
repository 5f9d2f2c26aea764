"""The cost of one reward's scores: calls, seconds, cold starts, money.

Takes: each call at its end. Gives: flat numbers, for the last calls and for the whole run. Never:
stores a request.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final

from rollart_core.contracts.reward import RewardCost

NUM_RECENT: Final = 1024
"""Number of recent calls in the quantiles."""
NUM_USUAL: Final = 20
"""Minimum number of calls before a call can count as slow."""
LOOK_S: Final = 0.1
"""Seconds for which an estimate of the usual time is reused."""
COUNTS: Final = (
    *("scores", "failed", "calls", "invocations", "broken"),
    *("retries", "hedges", "hedges_won", "fallbacks"),
)
"""``failed``: scores that failed permanently. ``broken``: calls without an answer."""


class RewardStats:
    """The statistics of one reward on its backends."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._took_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._since_s: dict[int, float] = {}
        self._known_s = -math.inf
        self._slow_s: float | None = None
        self._gb_s = 0.0
        self._num_cold = 0
        self._num_known = 0

    def begun(self, now_s: float) -> int:
        """Record the start of a call and return its number."""
        self.counts["calls"] += 1
        self._since_s[self.counts["calls"]] = now_s
        return self.counts["calls"]

    def answered(self, call: int, now_s: float, cost: RewardCost) -> None:
        """Record an answered call."""
        self._took_s.append(now_s - self._since_s.pop(call))
        self.counts["invocations"] += cost.num_invocations
        self._gb_s += cost.billed_gb_s
        if cost.cold is not None:
            self._num_known += 1
            self._num_cold += cost.cold

    def unanswered(self, call: int) -> None:
        """Record a call without an answer. A backend may still have run it."""
        del self._since_s[call]
        self.counts["invocations"] += 1

    def quantile_s(self, share: float) -> float | None:
        """Return the quantile of the last calls' times. None if there were no calls."""
        ordered = sorted(self._took_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    def slow_s(self, share: float, now_s: float) -> float | None:
        """Return the time within which this share of calls is answered. None if not known yet.

        Running calls count with their time so far. Among calls that began together, the first
        answers are the fast ones and do not represent the usual time (Kaplan and Meier 1958,
        doi:10.1080/01621459.1958.10501452, eq. 2b: the product of (n - 1) / n over all answers,
        where n is the number of calls that took or may still take at least as long).
        """
        if len(self._took_s) < NUM_USUAL:
            return None
        if now_s >= self._known_s + LOOK_S:
            self._known_s, self._slow_s = now_s, self._estimated(share, now_s)
        return self._slow_s

    def _estimated(self, share: float, now_s: float) -> float | None:
        answered = [(took_s, False) for took_s in self._took_s]
        waiting = [(now_s - since_s, True) for since_s in self._since_s.values()]
        left, num_left = 1.0, len(answered) + len(waiting)
        for age_s, still_waits in sorted(answered + waiting):
            left *= (num_left - (not still_waits)) / num_left
            if left <= 1 - share:
                return age_s
            num_left -= 1
        return None

    def numbers(self) -> dict[str, float]:
        """Return all known numbers. Unknown numbers are omitted."""
        found = {name: float(self.counts[name]) for name in COUNTS}
        found["gb_s"] = self._gb_s
        if self._num_known:
            found["cold_share"] = self._num_cold / self._num_known
        for name, share in (("p50_s", 0.5), ("p95_s", 0.95)):
            took_s = self.quantile_s(share)
            if took_s is not None:
                found[name] = took_s
        return found
