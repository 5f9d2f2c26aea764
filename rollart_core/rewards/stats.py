"""What the scores of one reward have cost: calls, seconds, starts, money.

Takes: each call as it ends. Gives: flat numbers, of the last calls and of the whole run. Never:
keeps a request.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final

from rollart_core.contracts.reward import RewardCost

NUM_RECENT: Final = 1024
"""Calls whose times the quantiles are of."""
NUM_USUAL: Final = 20
"""Calls that must have been seen before one can be called slow."""
LOOK_S: Final = 0.1
"""For how long an estimate of what is usual is good."""
COUNTS: Final = (
    *("scores", "failed", "calls", "invocations", "broken"),
    *("retries", "hedges", "hedges_won", "fallbacks"),
)
"""``failed``: scores that failed for good; ``broken``: calls without an answer."""


class RewardStats:
    """The account of one reward on its backends."""

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
        """A call is made; return what it is known by here."""
        self.counts["calls"] += 1
        self._since_s[self.counts["calls"]] = now_s
        return self.counts["calls"]

    def answered(self, call: int, now_s: float, cost: RewardCost) -> None:
        """A call was answered."""
        self._took_s.append(now_s - self._since_s.pop(call))
        self.counts["invocations"] += cost.num_invocations
        self._gb_s += cost.billed_gb_s
        if cost.cold is not None:
            self._num_known += 1
            self._num_cold += cost.cold

    def unanswered(self, call: int) -> None:
        """A call was not answered; somebody may have worked on it all the same."""
        del self._since_s[call]
        self.counts["invocations"] += 1

    def quantile_s(self, share: float) -> float | None:
        """Return the time that this share of the last calls stayed below; None without any."""
        ordered = sorted(self._took_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    def slow_s(self, share: float, now_s: float) -> float | None:
        """Return the time within which this share of calls is answered; None: not known yet.

        Calls under way count for as long as they have been: of many that began together the first
        answers are the quick ones, and say little of what is usual (Kaplan and Meier 1958,
        doi:10.1080/01621459.1958.10501452, eq. 2b: the product of (n - 1) / n over all answers,
        with n calls that took as long, or still may).
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
        """Return all of it; what is not known is not there."""
        found = {name: float(self.counts[name]) for name in COUNTS}
        found["gb_s"] = self._gb_s
        if self._num_known:
            found["cold_share"] = self._num_cold / self._num_known
        for name, share in (("p50_s", 0.5), ("p95_s", 0.95)):
            took_s = self.quantile_s(share)
            if took_s is not None:
                found[name] = took_s
        return found
