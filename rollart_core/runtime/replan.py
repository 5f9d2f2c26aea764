"""When to plan again: a run's workloads, measured as it goes on, against those planned with.

Takes: finished trajectories. Gives: workloads to plan with anew, once one has left its plan by more
than a factor. Never: plans, reads a clock, or asks twice for one change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart_core.contracts.env import Workload
from rollart_core.runtime.workload import WorkloadMeter, departures
from rollart_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Departure:
    """Workloads have left what was planned with."""

    workloads: Mapping[str, Workload]
    """What to plan with now: measured where there is enough, else as before."""
    why: tuple[str, ...]
    """A phrase for each environment that left, such as ``toy/X-v1: turns 9 instead of 3``."""


class Replanner:
    """Watches the workloads of a run.

    Hysteresis: what was measured becomes what is planned with, so the next plan needs another
    ``factor``; and no plan follows the last before ``min_trajectories`` more of the environment.

    Args:
        declared: Env id -> workload of the first plan.
        factor: By how much a figure may differ from the plan's.
        min_trajectories: An environment's means may start a plan after so many, and are part of a
            plan that another started after half of that.
    """

    def __init__(
        self,
        declared: Mapping[str, Workload],
        *,
        factor: float = 1.5,
        min_trajectories: int = 64,
    ) -> None:
        if factor <= 1:
            raise ValueError(f"a factor of {factor:g} would plan again for nothing; it is above 1")
        self._factor = factor
        self._min_trajectories = min_trajectories
        self._planned = dict(declared)
        self._meters = {env_id: WorkloadMeter(w) for env_id, w in declared.items()}
        self._due_at = dict.fromkeys(declared, min_trajectories)

    def observe(self, trajectory: Trajectory) -> Departure | None:
        """Take a finished trajectory; returns what to plan with when that is due."""
        env_id = trajectory.ticket.task.env_id
        meter = self._meters.get(env_id)
        if meter is None:
            return None
        meter.add(trajectory)
        if meter.count < self._due_at[env_id]:
            return None
        self._due_at[env_id] = meter.count + self._min_trajectories
        if not departures(self._planned[env_id], meter.measured, self._factor):
            return None
        return self._depart()

    def _depart(self) -> Departure:
        """Make what was measured what is planned with."""
        why = []
        for env_id, meter in self._meters.items():
            if 2 * meter.count < self._min_trajectories:
                continue
            found = departures(self._planned[env_id], meter.measured, self._factor)
            why += [f"{env_id}: {', '.join(found)}"] if found else []
            self._planned[env_id] = meter.measured
            self._due_at[env_id] = meter.count + self._min_trajectories
        return Departure(dict(self._planned), tuple(why))
