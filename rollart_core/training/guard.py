"""The guard: checks the metrics of each batch, and trips if training degrades.

    metrics of a batch --> finite?  success fell?  KL, ratio, gradient norm?  entropy, text, length?
                                |                                                    |
                                +---------------> None, or Trip(rule, value, limit) <+

Takes: one plain mapping per batch. Gives: None, or a :class:`Trip`. Never: does I/O, reads a clock,
or rolls back anything (:mod:`rollart_core.runtime.train_phase` does).

Hard rules (non-finite values, success, KL, ratio, gradient norm) always apply. Soft rules (entropy,
repeated text, length) detect a change of the policy, which may be harmless. They are ignored while
success or reward is at its best.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

from rollart_core.config.evaluation import Guard as GuardConfig

WATCHED = {"success": "rollout/success_mean", "reward": "rollout/reward_mean"}
"""Value of ``guard.watch`` -> the metric."""
KL, RATIO, GRAD_NORM = "train/approx_kl", "train/is_ratio_max", "train/grad_norm"
ENTROPY, LOSS, NOT_FINITE = "train/entropy", "train/loss", "train/not_finite"
REPEATED, LENGTH = "rollout/repeated_share", "rollout/loss_tokens_mean"
WORST = (KL, RATIO, GRAD_NORM, NOT_FINITE)
"""Metrics of which the largest value counts if a batch has several updates."""

WARMUP_BATCHES = 16
"""Minimum number of values of a metric before the rules compare with them."""
REFERENCE = 200
"""Number of values for running medians and quantiles."""
BEST_OF = 16
"""Number of batches whose mean can be the best."""
FALLS = (2, 4, 8)
"""Numbers of last batches whose means are compared with the best."""
OUTLIERS_OF, OUTLIERS = 8, 2
"""Number of last ratios or gradient norms, and how many of them must be too large to trip. Clipping
bounds the effect of a single one."""
WIDENED = 4.0
"""Multiple of the running 99% quantile above which a value is unusual."""
CLEARLY_MORE_NATS = 0.3
"""Minimum rise of the entropy that counts."""
WELL = 0.9
"""Success from which on it counts as good, independent of earlier values."""

Rule = Literal[
    "not_finite", "drop", "kl", "ratio", "grad_norm", "entropy", "repeated", "length", "diverged"
]


@dataclass(frozen=True, slots=True)
class Trip:
    """The reason of a rollback."""

    rule: Rule
    value: float
    limit: float
    since_version: int
    """The first policy_version with a suspicious value."""
    reason: str
    """The reason as a sentence."""


class Guard:
    """Judges batches; see the module.

    Args:
        config: The section of the run config.
        best_over: Number of batches for which a best value counts (a curriculum makes tasks
            harder). If None, it always counts.
        is_mixed: Whether the run has several environments, so that a batch may have no success.
    """

    def __init__(
        self, config: GuardConfig, *, best_over: int | None = None, is_mixed: bool = False
    ) -> None:
        self._limits = config.limits
        self._configured = self._watch = config.watch
        self._best_over = best_over
        self._is_mixed = is_mixed
        self._bests: deque[float] = deque(maxlen=best_over or 1)
        self._first: float | None = None
        self._not_finite = 0
        self._values: dict[str, deque[float]] = {}
        self._versions: deque[int] = deque(maxlen=max(FALLS))

    def judge(self, policy_version: int, metrics: Mapping[str, float]) -> Trip | None:
        """Judge one batch; return a trip if it must be rolled back.

        Args:
            policy_version: Version of the trainer when it took the batch.
            metrics: Metrics by name, as in the journal. Metrics that the batch does not have are
                missing (``rollout/success_mean`` if no environment reports success).

        Raises:
            ValueError: If success is watched and no environment reports it: in the first batch, or
                in the first few batches if there are several environments.
        """
        self._versions.append(policy_version)
        watched = self._watched(metrics)
        self._not_finite = self._not_finite + 1 if metrics.get(NOT_FINITE) else 0
        if trip := self._check_finite(policy_version, metrics):
            return trip
        applied = not (self._not_finite or metrics.get("train/skipped"))
        names = (KL, RATIO, GRAD_NORM, ENTROPY) if applied else ()
        for name in (watched, *names, REPEATED, LENGTH):
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                self._of(name).append(value)
        updates = {name: metrics[name] for name in names if name in metrics}
        self._note_best(watched)
        return _first(list(self._trips(policy_version, watched, updates)))

    # State in a checkpoint

    def state(self) -> dict[str, Any]:
        """Return the statistics as plain JSON."""
        return {
            "watch": self._watch,
            "bests": list(self._bests),
            "first": self._first,
            "not_finite": self._not_finite,
            "values": {name: list(values) for name, values in self._values.items()},
            "versions": list(self._versions),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state`; an empty mapping resets the guard."""
        self._watch = state.get("watch", self._configured)
        self._bests = deque(state.get("bests", ()), maxlen=self._best_over or 1)
        self._first = state.get("first")
        self._not_finite = state.get("not_finite", 0)
        self._values = {}
        for name, values in state.get("values", {}).items():
            self._of(name).extend(values)
        self._versions = deque(state.get("versions", ()), maxlen=max(FALLS))

    # Rules

    def _trips(self, version: int, watched: str, updates: Mapping[str, float]) -> Iterator[Trip]:
        """Yield the trips of all rules, the most reliable first."""
        limits = self._limits
        found: list[Trip | None] = [self._check_fall(watched)]
        if KL in updates and limits.kl is not None:
            found.append(self._check_kl(version, limits.kl))
        if RATIO in updates and limits.ratio is not None:
            found.append(self._check_outliers("ratio", RATIO, limits.ratio))
        if GRAD_NORM in updates and limits.grad_norm is not None:
            usual = median(self._before(GRAD_NORM, OUTLIERS_OF) or [math.inf])
            found.append(self._check_outliers("grad_norm", GRAD_NORM, limits.grad_norm * usual))
        if not self._is_well(watched):
            found += [*self._check_entropy(), self._check_repeated(), self._check_length()]
        return (trip for trip in found if trip)

    def _check_finite(self, version: int, metrics: Mapping[str, float]) -> Trip | None:
        most = self._limits.not_finite
        if most is None:
            return None
        if self._not_finite >= most:
            since = self._versions[-min(self._not_finite, len(self._versions))]
            reason = f"the updates of {self._not_finite} batches in a row were not finite"
            return Trip("not_finite", self._not_finite, most, since, reason)
        if self._not_finite:
            return None  # it was not applied: nothing to roll back
        names = (*WATCHED.values(), LOSS, KL, GRAD_NORM, ENTROPY)
        for name in names:
            value = metrics.get(name)
            if value is not None and not math.isfinite(value):
                return Trip("not_finite", value, math.inf, version, f"{name} is {value}")
        return None

    def _check_fall(self, watched: str) -> Trip | None:
        """Compare the means of the last batches with the best mean."""
        values, drop = self._of(watched), self._limits.drop
        if drop is None or not self._bests:
            return None
        best, sigma = max(self._bests), self._noise(watched)
        scale = 1.0
        if watched != WATCHED["success"]:
            scale = max(abs(best), best - (self._first if self._first is not None else best))
        for k in FALLS:
            errors = self._limits.noise * sigma * math.sqrt(1 / k + 1 / BEST_OF)
            limit = best - max(drop * scale, errors, 1e-9)
            value = fmean(list(values)[-k:])
            if value < limit:
                said = f"{watched} fell to {value:.4g} (mean of {k} batches) from {best:.4g}"
                return Trip("drop", value, limit, self._fell_at(watched, best, limit), said)
        return None

    def _check_kl(self, version: int, limit: float) -> Trip | None:
        """Compare the last value with the limit and with the usual values."""
        before, value = self._before(KL, 1), self._of(KL)[-1]
        if not before:
            return None
        limit = max(limit, WIDENED * _quantile(before, 0.99))
        if value <= limit:
            return None
        return Trip("kl", value, limit, version, f"{KL} is {value:.4g}, above {limit:.4g}")

    def _check_outliers(self, rule: Rule, name: str, limit: float) -> Trip | None:
        """Check for several large values among the last; clipping bounds a single one."""
        before, last = self._before(name, OUTLIERS_OF), list(self._of(name))[-OUTLIERS_OF:]
        if not before:
            return None
        limit = max(limit, WIDENED * _quantile(before, 0.99))
        if last[-1] <= limit or sum(value > limit for value in last) < OUTLIERS:
            return None
        first = next(i for i, value in enumerate(last) if value > limit) - len(last)
        since = self._versions[max(first, -len(self._versions))]
        reason = f"{name} is {last[-1]:.4g}, and was repeatedly above {limit:.4g} recently"
        return Trip(rule, last[-1], limit, since, reason)

    def _check_entropy(self) -> list[Trip | None]:
        before = self._before(ENTROPY, 4)
        if not before:
            return []
        usual, now = median(before), fmean(list(self._of(ENTROPY))[-4:])
        low, high = self._limits.entropy_low, self._limits.entropy_high
        found: list[Trip | None] = []
        if low is not None and now < low * usual:
            found.append(self._soft("entropy", ENTROPY, now, low * usual, 4))
        if high is not None:
            limit = max(high * usual, usual + CLEARLY_MORE_NATS)
            found.append(self._soft("entropy", ENTROPY, now, limit, 4) if now > limit else None)
        return found

    def _check_repeated(self) -> Trip | None:
        before, share = self._before(REPEATED, 4), self._limits.repeated
        if not before or share is None:
            return None
        usual, now = median(before), fmean(list(self._of(REPEATED))[-4:])
        limit = usual + share * (1 - usual)
        return self._soft("repeated", REPEATED, now, limit, 4) if now > limit else None

    def _check_length(self) -> Trip | None:
        before, factor = self._before(LENGTH, 8), self._limits.length
        if not before or factor is None:
            return None
        usual, now = median(before), fmean(list(self._of(LENGTH))[-8:])
        errors = self._limits.noise * self._noise(LENGTH) * math.sqrt(1 / 8)
        if now > (limit := max(factor * usual, usual + errors)):
            return self._soft("length", LENGTH, now, limit, 8)
        if now < (limit := min(usual / factor, usual - errors)):
            return self._soft("length", LENGTH, now, limit, 8)
        return None

    def _soft(self, rule: Any, name: str, value: float, limit: float, k: int) -> Trip:
        side = "above" if value > limit else "below"
        reason = f"{name} is {value:.4g} (mean of {k} batches), {side} {limit:.4g}"
        return Trip(rule, value, limit, self._versions[-min(k, len(self._versions))], reason)

    # Reference values of the rules

    def _watched(self, metrics: Mapping[str, float]) -> str:
        """Return the watched metric; it is chosen once.

        Raises:
            ValueError: As in :meth:`judge`.
        """
        seen = WATCHED["success"] in metrics or bool(self._values.get(WATCHED["success"]))
        sure = seen or not self._is_mixed or len(self._versions) == self._versions.maxlen
        if self._watch is None and sure:
            self._watch = "success" if seen else "reward"
        elif self._watch == "success" and sure and not seen:
            raise ValueError(
                "guard.watch is success, but no environment reports success: set guard.watch to "
                "reward, or return success in the environment's info"
            )
        return WATCHED[self._watch or "reward"]

    def _of(self, name: str) -> deque[float]:
        return self._values.setdefault(name, deque(maxlen=REFERENCE))

    def _before(self, name: str, last: int) -> Sequence[float]:
        """Return the values before the last few; empty if there are too few."""
        values = list(self._of(name))[:-last]
        return values if len(values) >= WARMUP_BATCHES else ()

    def _note_best(self, watched: str) -> None:
        values = list(self._of(watched))
        if len(values) < max(WARMUP_BATCHES, BEST_OF):
            return
        mean = fmean(values[-BEST_OF:])
        if self._first is None:
            self._first = mean
        if self._best_over is not None or not self._bests or mean > self._bests[0]:
            self._bests.append(mean)

    def _noise(self, name: str) -> float:
        """Return the standard deviation of a batch's value, from differences of neighbours.

        The last batches are excluded, because a fall would increase the estimate.
        """
        values = list(self._of(name))[: -max(FALLS)]
        steps = [(b - a) ** 2 / 2 for a, b in pairwise(values)]
        return math.sqrt(fmean(steps)) if steps else math.inf

    def _is_well(self, watched: str) -> bool:
        """Return whether success or reward is at its best, and better than at the beginning."""
        if not self._bests or self._first is None:
            return True  # too early to decide
        now, best = fmean(list(self._of(watched))[-8:]), max(self._bests)
        if watched == WATCHED["success"] and now >= WELL:
            return True
        errors = 3 * self._noise(watched)
        return best > self._first + errors / 4 and now >= best - errors / math.sqrt(8)

    def _fell_at(self, watched: str, best: float, limit: float) -> int:
        """Return the first version from which on the value was low."""
        versions, usual = list(self._versions), best - (best - limit) / 4
        values = list(self._of(watched))[-len(versions) :]
        since = versions[-1]
        for version, value in zip(reversed(versions), reversed(values), strict=False):
            if value >= usual:
                break
            since = version
        return since


def of_batch(
    updates: Sequence[Mapping[str, float]], shared: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a batch for the guard.

    Args:
        updates: Metrics of each update of the batch, without ``train/``.
        shared: Metrics of the whole batch.
    """
    merged = dict(shared)
    for name in (*WORST, ENTROPY, LOSS, "train/skipped"):
        found = [u[key] for u in updates if (key := name.removeprefix("train/")) in u]
        if found:
            merged[name] = _worst(found) if name in WORST else fmean(found)
    return merged


def _first(trips: Sequence[Trip]) -> Trip | None:
    """Return the first trip, with the reasons of all trips."""
    if not trips:
        return None
    since = min(trip.since_version for trip in trips)
    return replace(trips[0], since_version=since, reason="; ".join(t.reason for t in trips))


def _worst(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest-rank method."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
