"""The RL phase of a run: scheduler, controller and task source, wired and run to their end.

Takes: a resolved run, its parts, and where a resume stands. Gives: why the phase ended. Never:
decides what is trained (the scheduler does), or starts a part (the runtime does).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollart_core.engine.buffer import Buffer
from rollart_core.engine.controller import Controller, ControllerParts, EnginesPart
from rollart_core.engine.events import RunStarted, SchedulePolicy, StopRun
from rollart_core.engine.recorder import CheckpointPlan, RunRecorder
from rollart_core.engine.run_dir import RunState
from rollart_core.engine.scheduler import Scheduler
from rollart_core.engine.tasks import TaskSource
from rollart_core.plugins import plugins
from rollart_core.resolve import ResolvedRun
from rollart_core.runtime.base import TrainerHandle
from rollart_core.types import Group, Ticket, Trajectory


@dataclass(frozen=True, slots=True)
class TrainParts:
    """What the phase works with."""

    recorder: RunRecorder
    trainer: TrainerHandle
    engines: EnginesPart
    run_episode: Callable[[Ticket, int], Awaitable[Trajectory]]
    num_tasks: int | None
    """Of the split that is trained on; None: without end."""


class TrainPhase:
    """Runs the loop until a stop condition holds; see the module."""

    def __init__(self, run: ResolvedRun, parts: TrainParts) -> None:
        """Wire a run's parts."""
        self._run = run
        self._config = run.config
        self._parts = parts
        self._controller: Controller | None = None

    @property
    def running(self) -> bool:
        """True while it can be asked to stop."""
        return self._controller is not None

    async def execute(self, state: RunState | None, next_ordinal: int) -> StopRun:
        """Train, from the beginning or from where a checkpoint stands."""
        parts, config = self._parts, self._config
        env_id, split = self._run.env.spec.id, config.rollout.split
        source = TaskSource(env_id, split, parts.num_tasks, config.seed)
        if state is not None:
            source.restore(state.task_source)
            for task in state.open_tasks:
                source.requeue(task)
        scheduler = Scheduler(schedule_policy(self._run), source)
        parts.recorder.begin_training(CheckpointPlan(parts.trainer.call, source, state))
        controller = self._controller = Controller(
            ControllerParts(
                scheduler=scheduler,
                buffer=Buffer(config.rollout.group_size, _capacity(self._run)),
                run_episode=parts.run_episode,
                trainer=parts.trainer,
                engines=parts.engines,
                keep_group=_keep_group,
                recorder=parts.recorder,
            ),
            ticket_s=config.deadlines.ticket_s,
            wall_s=None if config.stop.wall_s is None else _left(config.stop.wall_s, state),
        )
        version = state.policy_version if state else 0
        try:
            return await controller.run(RunStarted(version, next_ordinal))
        finally:
            self._controller = None
            parts.recorder.end_training(scheduler.snapshot())

    def request_stop(self, reason: str) -> None:
        """Ask for the end; a batch in training is finished first."""
        if self._controller is not None:
            self._controller.request_stop(reason)

    def fail(self, error: BaseException) -> None:
        """End with an error of a part that training cannot do without."""
        if self._controller is not None:
            self._controller.fail(error)


def schedule_policy(run: ResolvedRun) -> SchedulePolicy:
    """Return the numbers the scheduler obeys."""
    config, rollout, failures = run.config, run.config.rollout, run.config.failures
    return SchedulePolicy(
        groups_per_batch=rollout.groups_per_batch,
        group_size=rollout.group_size,
        max_concurrent=rollout.max_concurrent,
        mode=config.mode,
        min_group_size=rollout.min_group_size,
        max_staleness=config.staleness_bound,
        on_stale=getattr(config, "on_stale", "wait"),
        max_retries=failures.max_retries,
        max_failure_rate=failures.max_rate,
        failure_window=failures.window,
        num_batches=config.stop.batches,
    )


def _capacity(run: ResolvedRun) -> int:
    rollout = run.config.rollout
    groups = rollout.groups_per_batch * (run.config.staleness_bound + 1)
    return groups * rollout.group_size


def _keep_group(group: Group) -> bool:
    return plugins().decide("rollart_filter_group", group=group) is not False


def _left(wall_s: float, state: RunState | None) -> float:
    return max(1.0, wall_s - (state.train_wall_s if state else 0.0))
