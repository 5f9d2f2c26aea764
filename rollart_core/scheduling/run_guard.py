"""The guard of one run: it judges batches as they are trained, and knows each time it tripped.

    batch --> judge --> GuardTripped --> the journal: guard_tripped --> checkpoint, new version
                                              |
    a process that resumes the run <----------+

Takes: batches, the events of a journal. Gives: :class:`GuardTripped`, and the version that a run
goes on as. Never: writes, or loads a checkpoint. The journal records a trip before anything is
undone, so that a run that is killed in between is undone when it goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollart_core.config.evaluation import Guard as GuardConfig
from rollart_core.errors import ConfigError
from rollart_core.store.journal_schema import EventRow
from rollart_core.training.guard import WATCHED, Guard, Trip, of_batch
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group

GUARD_TRIPPED = "guard_tripped"
"""Kind of the event that says why training is undone, from which version on, and what follows."""
BEST_OVER_WITH_CURRICULUM = 64
"""Batches for which a best counts in a run whose tasks become harder on purpose."""


class GuardTripped(Exception):
    """The batch that was just trained is to be undone."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip.reason)
        self.trip = trip


@dataclass(frozen=True, slots=True)
class Rollback:
    """One trip of the guard, and what the run did."""

    policy_version: int
    """Of the trainer when it took the batch that tripped."""
    rule: str
    value: float | None
    """None: it was not finite."""
    limit: float | None
    since_version: int
    reason: str
    back_to: int
    """The version whose checkpoint was loaded."""
    as_version: int
    """What these weights are called from now on: above every version used before."""
    lr_factor: float
    """Of the learning rate from now on: all trips together."""

    @property
    def discards(self) -> tuple[int, int]:
        """The versions that are undone: the first, and the one after the last."""
        return self.back_to, self.as_version

    def payload(self) -> dict[str, Any]:
        """Return it as the event's content."""
        return asdict(self)


class RunGuard:
    """Judges batches and counts trips.

    Args:
        config: The section of the run config; None: nothing is judged, but trips of an earlier
            process are known.
        has_curriculum: Whether tasks become harder on purpose.
        is_mixed: Whether there are several environments.
    """

    def __init__(
        self, config: GuardConfig | None, *, has_curriculum: bool = False, is_mixed: bool = False
    ) -> None:
        self._config = config
        best_over = BEST_OVER_WITH_CURRICULUM if has_curriculum else None
        self._guard = Guard(config, best_over=best_over, is_mixed=is_mixed) if config else None
        self._rollbacks: list[Rollback] = []
        self.lr_factor = 1.0
        """What the learning rate is multiplied by."""

    @property
    def is_on(self) -> bool:
        """Whether batches are judged."""
        return self._config is not None

    @property
    def last(self) -> Rollback | None:
        """The last trip of the run, in whichever process."""
        return self._rollbacks[-1] if self._rollbacks else None

    @property
    def window(self) -> int:
        """Batches that must pass before a checkpoint counts as good; 0 when the guard is off."""
        return self._config.window if self._config else 0

    @property
    def is_used_up(self) -> bool:
        """Whether it has tripped more often than the run may go back."""
        return self._config is not None and len(self._rollbacks) > self._config.max_rollbacks

    def judge(
        self, groups: Sequence[Group], reports: Sequence[TrainStepReport], shared: Mapping[str, Any]
    ) -> None:
        """Judge a batch that was just trained.

        Raises:
            GuardTripped: When it is to be undone.
            ConfigError: When success is to be watched and no environment says it.
        """
        if self._guard is None or not reports:
            return
        metrics = of_batch([r.metrics for r in reports], shared)
        if all(t.success is None for g in groups for t in g.trajectories):
            metrics.pop(WATCHED["success"], None)
        try:
            trip = self._guard.judge(reports[-1].policy_version, metrics)
        except ValueError as e:
            raise ConfigError(str(e)) from e
        if trip is not None:
            raise GuardTripped(trip)

    def tripped(self, trip: Trip, version: int, back_to: int, as_version: int) -> Rollback:
        """Take note of a trip.

        Args:
            trip: Why.
            version: Of the trainer when it took the batch.
            back_to: Of the checkpoint to go on from.
            as_version: What its weights are called from now on.
        """
        assert self._config is not None
        stops = len(self._rollbacks) >= self._config.max_rollbacks
        factor = self.lr_factor * (1.0 if stops else self._config.lr_factor)
        rollback = Rollback(
            policy_version=version,
            rule=trip.rule,
            value=_finite(trip.value),
            limit=_finite(trip.limit),
            since_version=trip.since_version,
            reason=trip.reason,
            back_to=back_to,
            as_version=as_version,
            lr_factor=factor,
        )
        self._rollbacks.append(rollback)
        return rollback

    def remember(self, events: Iterable[EventRow]) -> None:
        """Read the trips of earlier processes from the events of the journal."""
        self._rollbacks = [Rollback(**json.loads(event.payload)) for event in events]

    # What a checkpoint keeps

    def state(self) -> dict[str, Any]:
        """Return what it knows of the batches so far, as plain JSON."""
        return self._guard.state() if self._guard else {}

    def restore(self, state: Mapping[str, Any], lr_factor: float) -> None:
        """Go on from a checkpoint; a trip since then has lowered the learning rate further.

        Args:
            state: What :meth:`state` returned.
            lr_factor: Of the checkpoint.
        """
        self.lr_factor = self.last.lr_factor if self.last else lr_factor
        if self._guard is not None:
            self._guard.restore(state)

    def goes_on_as(self, version: int, newest_batch: int) -> int:
        """Return what the weights of a checkpoint are called from now on.

        Args:
            version: Of the checkpoint.
            newest_batch: The last version at which a batch was ever taken; -1: none.

        Returns:
            The same, unless it lies before a trip: then a version above all that were used.
        """
        if self.last is None or version >= self.last.as_version:
            return version
        if newest_batch < self.last.as_version:
            return self.last.as_version
        return newest_batch + 2

    def is_undone(self, version: int) -> bool:
        """Return whether the weights of a version were undone."""
        return any(r.back_to < version < r.as_version for r in self._rollbacks)

    def used_up_reason(self) -> str:
        """Say why the run ends."""
        assert self._config is not None
        assert self.last is not None
        most = self._config.max_rollbacks
        return (
            f"guard.max_rollbacks ({most}) are used up, and the guard tripped again: "
            f"{self.last.reason}. The run ends with the weights of version {self.last.back_to}: "
            "lower trainer.lr, or raise guard.max_rollbacks and go on with --resume"
        )

    def message(self) -> str:
        """Say what happened, and what follows."""
        assert self.last is not None
        last = self.last
        text = (
            f"The guard tripped ({last.rule}) at version {last.policy_version}: {last.reason}. "
            f"The run goes back to the checkpoint of version {last.back_to}, leaves out what was "
            f"trained since, and goes on as version {last.as_version}"
        )
        if self.is_used_up or self._config is None:
            return f"{text}."
        most = self._config.max_rollbacks
        return (
            f"{text} with {last.lr_factor:g} times the learning rate (rollback "
            f"{len(self._rollbacks)} of at most {most})."
        )

    def report(self) -> dict[str, Any] | None:
        """Return what ``report.json`` says of it; None when the guard is off and never tripped."""
        if self._config is None and not self._rollbacks:
            return None
        num_rollbacks = len(self._rollbacks)
        if self._config is not None:
            num_rollbacks = min(num_rollbacks, self._config.max_rollbacks)
        return {
            "trips": [rollback.payload() for rollback in self._rollbacks],
            "rollbacks": num_rollbacks,
            "lr_factor": self.lr_factor,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
