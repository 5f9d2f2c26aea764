"""The recorder of a run: passes its events to journal, trackers, hooks and totals.

Takes: the events of the controller. Gives: the totals of a report. Never: makes decisions about
the schedule. A tracker that raises is disabled with a message; a journal that cannot write ends the
run.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.tracker import Tracker
from rollart_core.errors import described, is_from_outside
from rollart_core.plugins.manager import plugins
from rollart_core.scheduling.controller import BatchRecord
from rollart_core.scheduling.evaluate import EvaluationResult
from rollart_core.scheduling.events import (
    AbortEpisode,
    DropGroup,
    LoseTicket,
    ReturningGroup,
    RunStarted,
    Snapshot,
    StopRun,
)
from rollart_core.scheduling.observer import RunObserver
from rollart_core.scheduling.run_guard import GUARD_TRIPPED, RunGuard
from rollart_core.scheduling.task_mix import Tasks
from rollart_core.scheduling.validations import SCORE, SUCCESS, Validation, Validations, spelled
from rollart_core.store.checkpoints import CallTrainer, Checkpoints
from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import JournalReader, ordinal
from rollart_core.store.journal_schema import BATCH_TOTALS, EVALUATED, STARTED, TRAINING
from rollart_core.store.metrics import (
    BatchTotals,
    SwapLedger,
    Totals,
    components_mean,
    env_metrics,
    rollout_metrics,
    staleness_histogram,
    step_seconds,
)
from rollart_core.store.run_dir import RunState, checkpoint_folder
from rollart_core.training.guard import Trip
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Task, Ticket, Trajectory

NUM_WITHOUT_SIGNAL = 3
"""Number of batches without an advantage after which the run warns."""
NO_SIGNAL = (
    "Warning: the rewards within every group of the first 3 batches are equal (mean {:g}), so the "
    "policy learns nothing. Add warm_start, use easier tasks, or raise rollout.group_size."
)
Evaluations: TypeAlias = tuple[EvaluationResult | None, EvaluationResult | None]
"""A sampled and a greedy evaluation; None: not measured."""
_EVALUATIONS = TypeAdapter[Evaluations](Evaluations)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The components that a checkpoint saves."""

    trainer: CallTrainer
    source: Tasks
    wall_s: float = 0.0
    """Seconds of the RL phase before this process."""
    num_requeued: int = 0
    """Number of tasks put back into the source before this process."""


class RunRecorder:
    """Implements :class:`rollart_core.scheduling.controller.Recorder`."""

    def __init__(self, run: ResolvedRun, run_dir: Path, observer: RunObserver) -> None:
        """Create the recorder; ``start`` opens the files."""
        self._run = run
        self.run_dir = run_dir
        self._observer = observer
        self._journal: Journal | None = None
        keep = run.config.checkpoint.keep
        has_curriculum = run.config.curriculum is not None
        self.guard = RunGuard(
            run.config.guard, has_curriculum=has_curriculum, is_mixed=run.is_mixed
        )
        self.checkpoints = Checkpoints(
            run_dir, keep, observer.message, guard_window=self.guard.window
        )
        self._trackers: list[Tracker] = []
        self._plan: CheckpointPlan | None = None
        self._totals = Totals()
        self.earlier_s = 0.0
        """Seconds of earlier processes of the run."""
        self._open: dict[str, Task] = {}
        self._next_ordinal = 0
        self._num_requeued = 0
        self._num_halvings = 0
        self.saved_version = -1
        """Policy version of the last checkpoint that was written or loaded."""
        self._train_step = 0
        self._last_report = 0
        self._swaps = SwapLedger()
        self.validations = Validations(run.config.checkpoint.keep_best, run.config.stop.when)
        """The validations that are not rolled back."""
        self.gauges: Callable[[], Mapping[str, float]] = dict
        """Returns gauges of the workers and their load, for the metrics."""
        self.row_note: str | None = None
        """Why the chat template begins a new row in each turn; None if it does not."""
        self._warns = run.config.rollout.keep_thinking is not False
        """Whether to warn of trajectories with several rows, once."""

    def start(self) -> None:
        """Open the journal, start the trackers, and call the hooks."""
        config = self._run.as_dict()
        self._journal = Journal(self.run_dir, config)
        with JournalReader(self.run_dir) as journal:
            tripped = journal.events(kind=GUARD_TRIPPED)
            with journal.decoding():
                self.guard.remember(tripped)
            self.earlier_s = journal.spent_s(STARTED)
            if self.earlier_s:  # the journal of an earlier release does not have the totals
                self._totals.restore(journal)
        self._log.event(STARTED)
        for plugin in self._run.trackers:
            tracker: Tracker = plugin.build()
            self._trackers.append(tracker)
            self._guard(tracker, "start", self.run_dir, config)
        plugins().observe("rollart_run_started", run_dir=self.run_dir, config=config)

    def plan(self, plan: CheckpointPlan) -> None:
        """Set the components of checkpoints; from now on, checkpoints can be taken."""
        self._plan = plan
        self._num_requeued = plan.num_requeued

    def begin_training(self) -> None:
        """Begin the RL phase."""
        self._totals.began = time.perf_counter()
        self._log.event(TRAINING)

    def end_incarnation(self, snapshot: Snapshot) -> None:
        """End an incarnation of the RL phase; the last one ends the phase."""
        self._totals.end_incarnation(snapshot)

    async def go_back(self, state: RunState, reason: str) -> RunStarted:
        """Begin a new incarnation at a checkpoint: a resume, a lost trainer, or a guard trip.

        Args:
            state: State of the checkpoint, whose weights the trainer holds.
            reason: The reason of the rollback.

        Returns:
            The first event for the scheduler.
        """
        version = state.policy_version
        as_version, last = await self.goes_on_as(state), self.guard.last
        discards = last.discards if last and version < last.as_version else None
        self._log.rolled_back(version, reason, as_version=as_version, discards=discards)
        self._totals.roll_back(version)
        self._open = {}
        self._swaps.begin_again()
        self.saved_version, self._train_step = version, state.train_step
        await asyncio.to_thread(self._log.flush)
        goes_on = replace(state, policy_version=as_version)
        started, known = await asyncio.to_thread(self._comeback, goes_on)
        recorded = [Validation.from_dict(one) for one in state.validations]
        self.validations.go_back(version, [*known, *recorded])
        self._next_ordinal = started.next_ordinal
        self._open = {g.group_id: g.task for g in started.returning}
        return started

    async def load_newest(self, trainer: CallTrainer) -> RunState:
        """Load the newest loadable checkpoint, with the guard's state in it.

        Raises:
            ConfigError: If there is none.
            TrainerLost: If the trainer died while loading it.
        """
        if self.guard.last is not None:
            await self.checkpoints.discard(*self.guard.last.discards)
        state = await self.checkpoints.load_newest(trainer)
        self.guard.restore(state.guard, state.lr_factor)
        if self.guard.lr_factor != 1.0:
            await trainer("set_lr_factor", self.guard.lr_factor)
        return state

    async def goes_on_as(self, state: RunState) -> int:
        """Return the version with which the weights of a checkpoint continue."""
        await asyncio.to_thread(self._log.flush)
        with JournalReader(self.run_dir) as journal:
            return self.guard.goes_on_as(state.policy_version, journal.newest_batch())

    async def tripped(self, trip: Trip, version: int, as_version: int) -> None:
        """Record a trip of the guard and the checkpoint to go back to; nothing is rolled back yet.

        Args:
            trip: The reason.
            version: Version of the trainer when it took the batch.
            as_version: The new version, above all used versions.
        """
        back_to = self.checkpoints.last_good(min(version, trip.since_version))
        rollback = self.guard.tripped(trip, version, back_to, as_version)
        self._log.event(GUARD_TRIPPED, rollback.payload(), policy_version=version)
        await asyncio.to_thread(self._log.flush)
        self._observer.message(self.guard.message())

    async def checkpoint(self, policy_version: int) -> None:
        """Take a checkpoint, unless this version already has one."""
        if policy_version == self.saved_version:
            return
        plan, totals = self._plan, self._totals
        assert plan is not None
        state = RunState(
            policy_version=policy_version,
            train_step=self._train_step,
            task_source=plan.source.state(),
            next_ordinal=self._next_ordinal,
            num_requeued=self._num_requeued,
            open_groups=dict(self._open),
            train_wall_s=plan.wall_s + totals.elapsed_s,
            validations=[one.as_dict() for one in self.validations.all],
            guard=self.guard.state(),
            lr_factor=self.guard.lr_factor,
        )
        folder = checkpoint_folder(self.run_dir, policy_version)
        await plan.trainer(
            "save", str(folder), policy_version=policy_version, train_step=self._train_step
        )
        # The journal must contain all records before a checkpoint that depends on them is complete.
        await asyncio.to_thread(self._log.flush)
        await self.checkpoints.finish(state)
        self.saved_version = policy_version

    def validated(self, policy_version: int, result: EvaluationResult, wall_s: float) -> Validation:
        """Record a validation.

        Raises:
            ConfigError: If the run uses a metric that none of its environments reports.
        """
        made = self.validations.add(policy_version, result)
        self._log.event("validation", made.as_dict(), policy_version=policy_version)
        metrics = {SUCCESS: made.success.mean, SCORE: made.score.mean, "validation/wall_s": wall_s}
        known = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self._log_metrics(self._train_step, policy_version, known)
        self.notify(f"validation at version {policy_version}: {spelled(made)}")
        return made

    def evaluated(self, tasks: Sequence[Task], results: Evaluations) -> None:
        """Record the evaluation before training."""
        # Text, because a score may be NaN, which the JSON of an event cannot hold.
        plain = json.dumps([asdict(one) if one else None for one in results])
        self._log.event(EVALUATED, {"tasks": list(map(asdict, tasks)), "results": plain})

    def evaluation(self, tasks: Sequence[Task]) -> Evaluations | None:
        """Return the evaluation of these tasks before training, by an earlier process."""
        with JournalReader(self.run_dir) as journal:
            events = journal.events(kind=EVALUATED)
            with journal.decoding():
                known = [json.loads(event.payload) for event in events]
                same = [one["results"] for one in known if one["tasks"] == list(map(asdict, tasks))]
                return _EVALUATIONS.validate_json(same[-1]) if same else None

    async def keep_best(self, policy_version: int) -> None:
        """Keep the checkpoint of the best validation whose weights still exist.

        Args:
            policy_version: The version of the trainer.
        """
        while (best := self.validations.best) is not None:
            version = best.policy_version
            if version == policy_version:
                await self.checkpoint(version)
            if self.checkpoints.has(version):
                break
            self.validations.leave_out(version)  # an earlier process did not keep its checkpoint
        if best is not None and self.checkpoints.marks().get("best") != best.policy_version:
            self.checkpoints.mark("best", best.policy_version, self.validations.point(best) or {})

    async def keep_good(self, policy_version: int) -> None:
        """Keep the checkpoint of a version that passed its validation, if there is a guard.

        It passed unless it is below the best one by more than its interval.

        Args:
            policy_version: The version of the trainer, which was validated last.
        """
        last = self.validations.last
        if self.guard.is_on and last and last.num_episodes and not self.validations.fell():
            await self.checkpoint(policy_version)
            self.checkpoints.mark("good", policy_version, self.validations.point(last) or {})

    def close(self, report: Mapping[str, object]) -> None:
        """Flush and close everything, and call the hooks."""
        for tracker in list(self._trackers):
            self._guard(tracker, "close")
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            plugins().observe("rollart_run_finished", run_dir=self.run_dir, report=report)

    def notify(self, text: str) -> None:
        """Show a message in the display."""
        self._observer.message(text)

    def event(self, kind: str, payload: Mapping[str, object]) -> None:
        """Record any other event; ``payload`` is plain JSON."""
        self._log.event(kind, payload)

    # Events of the controller

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """Record that an attempt begins."""
        self._open[ticket.group_id] = ticket.task
        self._next_ordinal = max(self._next_ordinal, ordinal(ticket.group_id) + 1)
        self._log.dispatched(ticket, start_version)

    def ended(self, trajectory: Trajectory) -> None:
        """Record that an attempt ended, successfully or not."""
        self._log.trajectory(trajectory)
        plugins().observe("rollart_trajectory_finished", trajectory=trajectory)
        if trajectory.failure is not None:
            self._totals.fail(trajectory)
            return
        self._totals.finish(trajectory)

    def cancelled(self, trajectory: Trajectory) -> None:
        """Record that an attempt was cancelled on purpose, with its turns so far."""
        self._log.trajectory(trajectory)

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """Record that the scheduler gave something up."""
        if isinstance(action, DropGroup):
            self._open.pop(action.group_id, None)
            self._num_requeued += action.requeued
        self._log.decided(action)

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """Record that the trainer begins a batch."""
        for group in groups:
            self._open.pop(group.group_id, None)
        self._log.batch_taken(groups, policy_version)

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """Record that all engines hold a new version."""
        self._swaps.add(swaps)

    async def batch_trained(self, record: BatchRecord) -> None:
        """Record a batch's metrics, and take a checkpoint if one is due."""
        # in a thread: with long trajectories it takes much longer than the loop may be blocked
        totals, shared = await asyncio.to_thread(self._figures_of, record)
        self._totals.by_batch[record.policy_version] = totals
        self._log.event(BATCH_TOTALS, totals.as_dict(), policy_version=record.policy_version)
        shared |= self._batch_metrics(record)
        self._log.batch_trained(record.policy_version)
        for report in record.train_steps:
            metrics = {**{f"train/{k}": v for k, v in report.metrics.items()}, **shared}
            self._last_report += 1
            self._log_metrics(self._last_report, record.policy_version, metrics)
            plugins().observe(
                "rollart_train_step_finished",
                train_step=self._last_report,
                policy_version=record.policy_version,
                metrics=metrics,
            )
            self._train_step = report.train_step
        self._show(shared, record)
        if self._totals.num_batches == NUM_WITHOUT_SIGNAL and not self._totals.has_signal:
            self.notify(NO_SIGNAL.format(shared["rollout/reward_mean"]))
        self._warn_of_rows(shared["rollout/rows_per_trajectory"])
        self._warn_of_memory(record.train_steps)
        self.guard.judge(record.groups, record.train_steps, shared)
        version = record.publication.policy_version
        if version % self._run.config.checkpoint.every_batches == 0:
            await self.checkpoint(version)

    def totals(self) -> dict[str, Any]:
        """Return the report's entries about the RL phase."""
        more = {"weights": self._swaps.totals(), "guard": self.guard.report()}
        return {**self._totals.as_dict(), **more}

    def totals_by_env(self) -> dict[str, dict[str, Any]]:
        """Return the outcomes of the attempts of each environment."""
        return self._totals.by_env(env.name for env in self._run.envs)

    # Helpers

    @property
    def _log(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _figures_of(self, record: BatchRecord) -> tuple[BatchTotals, dict[str, float]]:
        """Return the totals and the metrics of a batch's trajectories."""
        members = [t for g in record.groups for t in g.trajectories]
        staleness = staleness_histogram(record.groups, record.policy_version)
        updates = [r.metrics for r in record.train_steps]
        step_s = step_seconds(
            updates,
            waited_s=record.waited_s,
            train_s=record.train_s,
            publish_s=record.publication.publish_s,
        )
        totals = BatchTotals.of(members, staleness, updates, step_s)
        return totals, {
            **rollout_metrics(record.groups, record.policy_version),
            **components_mean(members),
            **(env_metrics(members) if len(self._run.envs) > 1 else {}),
        }

    def _batch_metrics(self, record: BatchRecord) -> dict[str, float]:
        return {
            **self.gauges(),
            "time/train_s": record.train_s,
            "time/trainer_waited_s": record.waited_s,
            **self._swaps.batch_metrics(record.publication),
            "time/wall_s": self._totals.earlier_s + self._totals.elapsed_s,
        }

    def _log_metrics(
        self, train_step: int, policy_version: int, metrics: Mapping[str, float]
    ) -> None:
        self._log.metrics(train_step, policy_version, metrics)
        for tracker in list(self._trackers):
            self._guard(
                tracker, "log", metrics, train_step=train_step, policy_version=policy_version
            )

    def _warn_of_rows(self, rows: float) -> None:
        if rows > 1 and self._warns:
            self._warns = False
            why = self.row_note or "the history of some conversations was rewritten"
            self.notify(f"Warning: {rows:.1f} token rows per trajectory: {why}")

    def _warn_of_memory(self, reports: Sequence[TrainStepReport]) -> None:
        num = int(max((r.metrics.get("microbatch_halvings", 0) for r in reports), default=0))
        if num > self._num_halvings:
            tokens = self._run.config.trainer.max_tokens_per_microbatch // 2**num
            self.notify(
                "Warning: the trainer's device ran out of memory, and microbatches were halved; "
                f"set trainer.max_tokens_per_microbatch to {tokens}"
            )
        self._num_halvings = num

    def _show(self, shared: Mapping[str, float], record: BatchRecord) -> None:
        stop, totals = self._run.config.stop, self._totals
        used_s = totals.elapsed_s + (self._plan.wall_s if self._plan else 0.0)
        done = [totals.num_batches / stop.batches] if stop.batches else []
        done += [used_s / stop.wall_s] if stop.wall_s else []
        last = record.train_steps[-1].metrics if record.train_steps else {}
        line: dict[str, float | str] = {
            "batch": totals.num_batches,
            "success": shared["rollout/success_mean"],
            "score": shared["rollout/score_mean"],
            "reward": shared["rollout/reward_mean"],
            "staleness": shared["staleness/mean"],
            "tokens_per_s": totals.tokens / (totals.earlier_s + totals.elapsed_s),
            "train_s": record.train_s,
            "waited_s": record.waited_s,
            "failed": sum(totals.failures.values()),
        }
        line.update({k: last[k] for k in ("entropy", "grad_norm") if k in last})
        self._observer.progress(min(1.0, max(done)), line)

    def _comeback(self, state: RunState) -> tuple[RunStarted, list[Validation]]:
        """Read from the journal the groups to run again and the valid validations."""
        with JournalReader(self.run_dir) as journal:
            returning = {g.group_id: g for g in journal.returning()}
            known = journal.group_ids()
            next_ordinal = max(journal.next_ordinal(), state.next_ordinal)
            validated = journal.validations()
            with journal.decoding():
                validations = list(map(Validation.from_dict, validated))
            self._last_report = max(self._last_report, journal.last_train_step())
        for group_id, task in state.open_groups.items():
            if group_id not in known:  # a power cut took the end of the journal
                returning[group_id] = ReturningGroup(group_id, ordinal(group_id), task, (1,))
        groups = sorted(returning.values(), key=lambda g: g.ordinal)
        return RunStarted(state.policy_version, next_ordinal, tuple(groups)), validations

    def _guard(self, tracker: Tracker, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except BaseException as e:
            if is_from_outside(e):
                raise
            name, why = type(tracker).__name__, described(e)
            self._observer.message(f"The tracker {name} is disabled: {method} raised {why}")
            self._trackers.remove(tracker)
