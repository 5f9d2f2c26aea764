"""The validations of a run: the best one, a drop of the last one, and early stopping.

    Validations.add(policy_version, result) --> best, last, fell(), stop_reason()

Takes: the results of validations, in the order of their policy versions. Gives: the decisions that
depend on them. Never: runs an episode, or reads a clock. A validation without a result (all its
episodes failed) is never the best one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.config.evaluation import StopWhen, ValidationMetric
from rollart_core.errors import ConfigError
from rollart_core.scheduling.evaluate import EvaluationResult
from rollart_core.store.estimates import Estimate

SUCCESS: ValidationMetric = "validation/success"
SCORE: ValidationMetric = "validation/score"


@dataclass(frozen=True, slots=True)
class Validation:
    """The validation of one policy version."""

    policy_version: int
    success: Estimate
    score: Estimate
    num_failed: int = 0
    """Number of episodes that failed despite retries."""
    is_best: bool = False
    """Whether it was the best one at its time."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes that ended without a failure."""
        return self.score.n

    def of(self, metric: ValidationMetric) -> Estimate:
        """Return the estimate of a metric."""
        return self.success if metric == SUCCESS else self.score

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON: means, intervals and counts; values that are not finite are null."""
        return {
            "policy_version": self.policy_version,
            **_flat("success", self.success),
            **_flat("score", self.score),
            "num_episodes": self.num_episodes,
            "num_with_success": self.success.n,
            "num_clusters": self.score.num_clusters,
            "num_clusters_with_success": self.success.num_clusters,
            "num_failed": self.num_failed,
            "is_best": self.is_best,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Validation:
        """Return the validation from the result of :meth:`as_dict`."""
        return cls(
            policy_version=int(content["policy_version"]),
            success=_estimate("success", content, "num_with_success", "num_clusters_with_success"),
            score=_estimate("score", content, "num_episodes", "num_clusters"),
            num_failed=int(content["num_failed"]),
            is_best=bool(content["is_best"]),
        )


class Validations:
    """The validations of a run; see the module."""

    def __init__(self, metric: ValidationMetric | None, when: StopWhen | None) -> None:
        """Create an empty list of validations.

        Args:
            metric: ``checkpoint.keep_best``, the metric of the best validation. If None: the metric
                of ``when``, or success if an environment reports it, else the score.
            when: ``stop.when``.
        """
        self._metric = metric or (when.metric if when else None)
        self._key = "checkpoint.keep_best" if metric else "stop.when.metric"
        self._when = when
        self._all: list[Validation] = []
        self._left_out: set[int] = set()

    @property
    def all(self) -> Sequence[Validation]:
        """All current validations, in order."""
        return tuple(self._all)

    @property
    def metric(self) -> ValidationMetric:
        """The metric that determines the best validation."""
        if self._metric is not None:
            return self._metric
        return SUCCESS if any(v.success.n for v in self._all) else SCORE

    @property
    def best(self) -> Validation | None:
        """The best validation; of equal ones the latest, which was trained longer."""
        left = (v for v in self._all if v.policy_version not in self._left_out)
        measured = [v for v in left if not math.isnan(self._value(v))]
        return max(measured, key=lambda v: (self._value(v), v.policy_version), default=None)

    @property
    def last(self) -> Validation | None:
        """The last validation."""
        return self._all[-1] if self._all else None

    def has(self, policy_version: int) -> bool:
        """Return whether a version has been validated."""
        return any(v.policy_version == policy_version for v in self._all)

    def add(self, policy_version: int, result: EvaluationResult) -> Validation:
        """Add the next validation.

        Raises:
            ConfigError: If the run uses a metric that none of its environments reports.
        """
        self._check(result)
        made = Validation(policy_version, result.success, result.score, result.num_failed)
        self._all.append(made)
        made = self._all[-1] = replace(made, is_best=self.best is made)
        return made

    def leave_out(self, policy_version: int) -> None:
        """Exclude a version from the best ones, because its weights are deleted."""
        self._left_out.add(policy_version)

    def go_back(self, policy_version: int, known: Iterable[Validation] = ()) -> None:
        """Keep only validations up to a version; add ``known`` ones of an earlier process.

        Args:
            policy_version: Version of the checkpoint that the run continues from.
            known: Validations in any order. A later one of the same version replaces an earlier
                one.
        """
        by_version = {v.policy_version: v for v in (*self._all, *known)}
        self._all = [by_version[v] for v in sorted(by_version) if v <= policy_version]

    def stop_reason(self) -> str | None:
        """Return why training ends according to ``stop.when``; None if it continues."""
        when = self._when
        if when is None or len(self._all) < when.patience:
            return None
        row = self._all[-when.patience :]
        shown = ", ".join(_number(when.metric, v.of(when.metric).mean) for v in row)
        at = ", ".join(str(v.policy_version) for v in row)
        if when.value is not None:
            if not all(v.of(when.metric).mean >= when.value for v in row):
                return None
            limit = _number(when.metric, when.value)
            return (
                f"stop.when: {when.metric} was {shown} at policy version {at}: at or above {limit} "
                f"in {_in_a_row(when.patience)}"
            )
        before = [v.of(when.metric).mean for v in self._all[: -when.patience]]
        known = [mean for mean in before if not math.isnan(mean)]
        if not known or any(v.of(when.metric).mean > max(known) for v in row):
            return None
        return (
            f"stop.when: {when.metric} was {shown} at policy version {at}: not above the best, "
            f"{_number(when.metric, max(known))}, in {_in_a_row(when.patience)}"
        )

    def fell(self) -> str | None:
        """Return a message if the last validation fell below the best by more than its interval."""
        best, last = self.best, self.last
        if best is None or last is None or not last.of(self.metric).high < self._value(best):
            return None
        now = last.of(self.metric)
        shown = [_number(self.metric, x) for x in (self._value(best), now.mean, now.low, now.high)]
        return (
            f"{self.metric} fell from {shown[0]} at policy version {best.policy_version} to "
            f"{shown[1]} [{shown[2]}, {shown[3]}] at version {last.policy_version}"
        )

    def point(self, validation: Validation | None) -> dict[str, Any] | None:
        """Return the version, metric and value of a validation for a report."""
        if validation is None:
            return None
        value, low, high = _flat("value", validation.of(self.metric)).values()
        at = {"policy_version": validation.policy_version, "metric": self.metric}
        return {**at, "value": value, "low": low, "high": high}

    def _value(self, validation: Validation) -> float:
        return validation.of(self.metric).mean

    def _check(self, result: EvaluationResult) -> None:
        wanted = {self._metric, self._when.metric if self._when else None}
        if SUCCESS in wanted and result.score.n and not result.success.n:
            key = self._key if self._metric == SUCCESS else "stop.when.metric"
            raise ConfigError(
                f"{key}: validation/success: no environment of this run reports whether an episode "
                'succeeded (info["success"]): use validation/score'
            )


def spelled(validation: Validation) -> str:
    """Return a validation as one line of text."""
    if not validation.num_episodes:
        return f"all {validation.num_failed} episodes failed"
    parts = []
    if validation.success.n:
        parts.append(f"success {_with_interval(SUCCESS, validation.success)}")
    parts.append(f"score {_with_interval(SCORE, validation.score)}")
    if validation.num_failed:
        parts.append(f"{validation.num_failed} failed")
    return ", ".join(parts) + (" (the best so far)" if validation.is_best else "")


def _with_interval(metric: ValidationMetric, estimate: Estimate) -> str:
    mean, low, high = (_number(metric, x) for x in (estimate.mean, estimate.low, estimate.high))
    bounded = math.isfinite(estimate.low) and math.isfinite(estimate.high)
    return f"{mean} [{low}, {high}]" if bounded else mean


def _number(metric: ValidationMetric, value: float) -> str:
    return f"{value:.1%}" if metric == SUCCESS else f"{value:.3f}"


def _in_a_row(patience: int) -> str:
    return "this validation" if patience == 1 else f"{patience} validations in a row"


def _flat(name: str, estimate: Estimate) -> dict[str, float | None]:
    values = {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


def _estimate(name: str, content: Mapping[str, Any], n: str, num_clusters: str) -> Estimate:
    instead = {name: math.nan, f"{name}_low": -math.inf, f"{name}_high": math.inf}
    mean, low, high = (v if content[k] is None else content[k] for k, v in instead.items())
    counts = int(content[n]), int(content[num_clusters])
    return Estimate(float(mean), float(low), float(high), *counts)
