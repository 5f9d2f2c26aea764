"""The guard of one run: it judges trained batches and stores every trip.

    batch --> judge --> GuardTripped --> the journal: guard_tripped --> checkpoint, new version
                                              |
    a process that resumes the run <----------+

Takes: batches, the events of a journal. Gives: :class:`GuardTripped`, and the version with which a
run continues. Never: writes or loads a checkpoint. The journal records a trip before anything is
rolled back. If the run is killed in between, the rollback happens when the run resumes.
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
"""Kind of the event that records a rollback: the reason, the versions and the consequences."""
BEST_OVER_WITH_CURRICULUM = 64
"""Number of batches for which a best value counts if a curriculum makes the tasks harder."""


class GuardTripped(Exception):
    """The last trained batch must be rolled back."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip.reason)
        self.trip = trip


@dataclass(frozen=True, slots=True)
class Rollback:
    """One trip of the guard and its consequences."""

    policy_version: int
    """Version of the trainer when it took the batch that tripped the guard."""
    rule: str
    value: float | None
    """None if it was not finite."""
    limit: float | None
    since_version: int
    reason: str
    back_to: int
    """The version whose checkpoint was loaded."""
    as_version: int
    """The new version of these weights; above every version used before."""
    lr_factor: float
    """The new factor of the learning rate, over all trips."""

    @property
    def discards(self) -> tuple[int, int]:
        """The versions that are rolled back: the first, and the one after the last."""
        return self.back_to, self.as_version

    def payload(self) -> dict[str, Any]:
        """Return the payload of the event."""
        return asdict(self)


class RunGuard:
    """Judges batches and counts trips.

    Args:
        config: The section of the run config. If None, batches are not judged, but trips of an
            earlier process still apply.
        has_curriculum: Whether a curriculum makes the tasks harder.
        is_mixed: Whether the run has several environments.
    """

    def __init__(
        self, config: GuardConfig | None, *, has_curriculum: bool = False, is_mixed: bool = False
    ) -> None:
        self._config = config
        best_over = BEST_OVER_WITH_CURRICULUM if has_curriculum else None
        self._guard = Guard(config, best_over=best_over, is_mixed=is_mixed) if config else None
        self._rollbacks: list[Rollback] = []
        self.lr_factor = 1.0
        """The factor of the learning rate."""

    @property
    def is_on(self) -> bool:
        """Whether batches are judged."""
        return self._config is not None

    @property
    def last(self) -> Rollback | None:
        """The last trip of the run, in this process or an earlier one."""
        return self._rollbacks[-1] if self._rollbacks else None

    @property
    def window(self) -> int:
        """Number of batches after which a checkpoint counts as good; 0 if the guard is off."""
        return self._config.window if self._config else 0

    @property
    def is_used_up(self) -> bool:
        """Whether the guard has tripped more than ``max_rollbacks`` times."""
        return self._config is not None and len(self._rollbacks) > self._config.max_rollbacks

    def judge(
        self, groups: Sequence[Group], reports: Sequence[TrainStepReport], shared: Mapping[str, Any]
    ) -> None:
        """Judge the last trained batch.

        Raises:
            GuardTripped: If the batch must be rolled back.
            ConfigError: If success is watched and no environment reports it.
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
        """Store a trip.

        Args:
            trip: The reason.
            version: Version of the trainer when it took the batch.
            back_to: Version of the checkpoint to continue from.
            as_version: The new version of its weights.
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

    # State in a checkpoint

    def state(self) -> dict[str, Any]:
        """Return the statistics of the batches so far, as plain JSON."""
        return self._guard.state() if self._guard else {}

    def restore(self, state: Mapping[str, Any], lr_factor: float) -> None:
        """Continue from a checkpoint; the factor of a later trip replaces that of the checkpoint.

        Args:
            state: The result of :meth:`state`.
            lr_factor: The factor in the checkpoint.
        """
        self.lr_factor = self.last.lr_factor if self.last else lr_factor
        if self._guard is not None:
            self._guard.restore(state)

    def goes_on_as(self, version: int, newest_batch: int) -> int:
        """Return the version with which the weights of a checkpoint continue.

        Args:
            version: Version of the checkpoint.
            newest_batch: The last version at which a batch was taken; -1 if none was.

        Returns:
            The same version. If it is older than a trip: a version above all used versions.
        """
        if self.last is None or version >= self.last.as_version:
            return version
        if newest_batch < self.last.as_version:
            return self.last.as_version
        return newest_batch + 2

    def used_up_reason(self) -> str:
        """Return why the run ends."""
        assert self._config is not None
        assert self.last is not None
        most = self._config.max_rollbacks
        return (
            f"guard.max_rollbacks ({most}) are used up, and the guard tripped again: "
            f"{self.last.reason}. The run ends with the weights of version {self.last.back_to}: "
            "lower trainer.lr, or raise guard.max_rollbacks and continue with --resume"
        )

    def message(self) -> str:
        """Return a message about the last trip and its consequences."""
        assert self.last is not None
        last = self.last
        text = (
            f"The guard tripped ({last.rule}) at version {last.policy_version}: {last.reason}. "
            f"The run goes back to the checkpoint of version {last.back_to}, discards the batches "
            f"trained since then, and continues as version {last.as_version}"
        )
        if self.is_used_up or self._config is None:
            return f"{text}."
        most = self._config.max_rollbacks
        return (
            f"{text} with {last.lr_factor:g} times the learning rate (rollback "
            f"{len(self._rollbacks)} of at most {most})."
        )

    def report(self) -> dict[str, Any] | None:
        """Return the guard's entry of ``report.json``; None if it is off and never tripped."""
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
