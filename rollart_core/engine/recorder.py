"""Keeps what happens in a run: in the journal, with the trackers and hooks, and in a few totals.

Takes: what the controller reports. Gives: the totals of a report. Never: decides anything. A
tracker that raises is switched off with a message; a journal that cannot write ends the run.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.tracker import Tracker
from rollart_core.engine.controller import BatchRecord
from rollart_core.engine.events import AbortEpisode, DropGroup, LoseTicket, Snapshot, StopRun
from rollart_core.engine.journal import Journal
from rollart_core.engine.metrics import components_mean, rollout_metrics, staleness_histogram
from rollart_core.engine.observer import RunObserver
from rollart_core.engine.run_dir import RunState, checkpoint_folder
from rollart_core.engine.tasks import TaskSource
from rollart_core.errors import first_line
from rollart_core.plugins import plugins
from rollart_core.resolve import ResolvedRun
from rollart_core.types import Group, Task, Ticket, Trajectory


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What a checkpoint is made of."""

    trainer: Callable[..., Awaitable[Any]]
    """Calls a method of the trainer by name."""
    source: TaskSource
    resumed: RunState | None


@dataclass(slots=True)
class _Totals:
    """Sums over the RL phase."""

    began: float = 0.0
    wall_s: float = 0.0
    tokens: int = 0
    generated: int = 0
    trained_tokens: int = 0
    train_steps: int = 0
    batches: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    finished: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Trajectories, their tokens, their turns: all that finished."""
    trained: list[int] = field(default_factory=lambda: [0, 0, 0])
    """The same of those that were trained."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)


class RunRecorder:
    """Implements :class:`rollart_core.engine.controller.Recorder`."""

    def __init__(self, run: ResolvedRun, run_dir: Path, observer: RunObserver) -> None:
        """Describe it; ``start`` opens files."""
        self._run = run
        self._run_dir = run_dir
        self._observer = observer
        self._journal: Journal | None = None
        self._trackers: list[Tracker] = []
        self._plan: CheckpointPlan | None = None
        self._totals = _Totals()
        self._open: dict[str, Task] = {}
        self._swaps: list[WeightSwap] = []

    def start(self) -> None:
        """Open the journal, start the trackers, tell the hooks."""
        config = self._run.as_dict()
        self._journal = Journal(self._run_dir, config)
        for plugin in self._run.trackers:
            tracker: Tracker = plugin.build()
            self._trackers.append(tracker)
            self._guard(tracker, "start", self._run_dir, config)
        plugins().observe("rollart_run_started", run_dir=self._run_dir, config=config)

    def begin_training(self, plan: CheckpointPlan) -> None:
        """The RL phase begins."""
        self._plan = plan
        self._totals = _Totals(began=time.perf_counter())
        if plan.resumed is not None:
            self._log.resumed(plan.resumed.policy_version)

    def end_training(self, snapshot: Snapshot) -> None:
        """The RL phase is over."""
        self._totals.wall_s = time.perf_counter() - self._totals.began
        self._totals.scheduler = asdict(snapshot)

    def close(self, report: Mapping[str, object]) -> None:
        """Flush and close everything, and tell the hooks."""
        for tracker in list(self._trackers):
            self._guard(tracker, "close")
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            plugins().observe("rollart_run_finished", run_dir=self._run_dir, report=report)

    def event(self, kind: str, payload: Mapping[str, object]) -> None:
        """Keep anything else that happened; ``payload`` is plain JSON."""
        self._log.event(kind, payload)

    # What the controller reports

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """An attempt begins."""
        self._open[ticket.group_id] = ticket.task
        self._log.dispatched(ticket, start_version)

    def ended(self, trajectory: Trajectory) -> None:
        """An attempt ended, well or not."""
        self._log.trajectory(trajectory)
        plugins().observe("rollart_trajectory_finished", trajectory=trajectory)
        if trajectory.failure is not None:
            self._totals.failures[trajectory.failure.kind.value] += 1
            return
        self._totals.tokens += trajectory.num_tokens
        self._totals.generated += trajectory.num_loss_tokens
        _add(self._totals.finished, trajectory)

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """The scheduler gave something up."""
        if isinstance(action, DropGroup):
            self._open.pop(action.group_id, None)
        self._log.decided(action)

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """The trainer begins a batch."""
        for group in groups:
            self._open.pop(group.group_id, None)
        self._log.batch_taken(groups, policy_version)

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """All engines hold a new version."""
        self._swaps.extend(swaps)

    async def batch_trained(self, record: BatchRecord) -> None:
        """Keep a batch's metrics, and take a checkpoint when one is due."""
        totals = self._totals
        members = [t for g in record.groups for t in g.trajectories]
        for trajectory in members:
            totals.trained_tokens += trajectory.num_tokens
            _add(totals.trained, trajectory)
        totals.staleness += staleness_histogram(record.groups, record.policy_version)
        totals.batches += 1
        totals.train_steps += len(record.train_steps)
        shared = self._batch_metrics(record)
        self._log.batch_trained(record.policy_version)
        for report in record.train_steps:
            metrics = {**{f"train/{k}": v for k, v in report.metrics.items()}, **shared}
            self._keep(report.train_step, record.policy_version, metrics)
        self._show(shared, record)
        if record.publication.policy_version % self._run.config.checkpoint.every_batches == 0:
            await self._checkpoint(record)

    def totals(self) -> dict[str, Any]:
        """Return what the report says of the RL phase."""
        totals = self._totals
        wall_s = max(totals.wall_s, 1e-9)
        return {
            "train_steps": totals.train_steps,
            "batches": totals.batches,
            "train_wall_s": totals.wall_s,
            "tokens_per_s": totals.tokens / wall_s,
            "generated_tokens_per_s": totals.generated / wall_s,
            "trained_tokens_per_s": totals.trained_tokens / wall_s,
            "staleness": {str(k): totals.staleness[k] for k in sorted(totals.staleness)},
            "failures": dict(totals.failures),
            "scheduler": totals.scheduler,
            "length_bias": _length_bias(totals),
        }

    # Parts of the above

    @property
    def _log(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _batch_metrics(self, record: BatchRecord) -> dict[str, float]:
        members = [t for g in record.groups for t in g.trajectories]
        swaps, self._swaps = self._swaps, []
        return {
            **rollout_metrics(record.groups, record.policy_version),
            **components_mean(members),
            "time/train_s": record.train_s,
            "time/trainer_waited_s": record.waited_s,
            "time/publish_s": record.publication.publish_s,
            "time/swap_stall_s": sum(s.stall_s for s in swaps),
            "time/wall_s": time.perf_counter() - self._totals.began,
        }

    def _keep(self, train_step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        self._log.metrics(train_step, policy_version, metrics)
        for tracker in list(self._trackers):
            self._guard(
                tracker, "log", metrics, train_step=train_step, policy_version=policy_version
            )
        plugins().observe(
            "rollart_train_step_finished",
            train_step=train_step,
            policy_version=policy_version,
            metrics=metrics,
        )

    def _show(self, shared: Mapping[str, float], record: BatchRecord) -> None:
        stop, totals = self._run.config.stop, self._totals
        wall_s = time.perf_counter() - totals.began
        done = [totals.batches / stop.batches] if stop.batches else []
        done += [wall_s / stop.wall_s] if stop.wall_s else []
        last = record.train_steps[-1].metrics if record.train_steps else {}
        line: dict[str, float | str] = {
            "batch": totals.batches,
            "success": shared["rollout/success_mean"],
            "score": shared["rollout/score_mean"],
            "reward": shared["rollout/reward_mean"],
            "staleness": shared["staleness/mean"],
            "tokens_per_s": totals.tokens / wall_s,
            "train_s": record.train_s,
            "waited_s": record.waited_s,
            "failed": sum(totals.failures.values()),
        }
        line.update({k: last[k] for k in ("entropy", "grad_norm") if k in last})
        self._observer.progress(min(1.0, max(done)), line)

    async def _checkpoint(self, record: BatchRecord) -> None:
        plan = self._plan
        assert plan is not None
        version = record.publication.policy_version
        folder = checkpoint_folder(self._run_dir, version)
        step = record.train_steps[-1].train_step if record.train_steps else 0
        source = plan.source.state()
        open_tasks = tuple(self._open.values())
        await plan.trainer("save", str(folder), policy_version=version, train_step=step)
        resumed_s = plan.resumed.train_wall_s if plan.resumed else 0.0
        wall_s = resumed_s + time.perf_counter() - self._totals.began
        state = RunState(version, step, source, open_tasks, wall_s)
        state.write(folder)
        keep = self._run.config.checkpoint.keep
        for old in sorted((self._run_dir / "checkpoints").glob("v*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _guard(self, tracker: Tracker, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as e:
            name = type(tracker).__name__
            why = f"{type(e).__name__}: {first_line(str(e))}"
            self._observer.message(f"The tracker {name} is switched off: {method} raised {why}")
            self._trackers.remove(tracker)


def _add(sums: list[int], trajectory: Trajectory) -> None:
    sums[0] += 1
    sums[1] += trajectory.num_tokens
    sums[2] += len(trajectory.turns)


def _length_bias(totals: _Totals) -> dict[str, float]:
    """Return mean tokens and turns of what finished and of what was trained."""
    bias: dict[str, float] = {}
    for name, (n, tokens, turns) in (("finished", totals.finished), ("trained", totals.trained)):
        bias[f"{name}_tokens_mean"] = tokens / n if n else 0.0
        bias[f"{name}_turns_mean"] = turns / n if n else 0.0
    return bias
