"""The RL phase of a run, which connects scheduler, controller and task source and runs them.

    checkpoint --> scheduler + controller: one incarnation --> the end
        ^                                          |
        +---- trainer restarted <------------------+--> TrainerLost
        +---- trip in the journal <----------------+--> GuardTripped

Takes: a resolved run, its workers and the resumed state. Gives: the reason why the phase ended.
Never: decides what is trained (the scheduler does), or how a worker is started (the runtime does).
Each incarnation has its own scheduler, controller and buffer, so late events from a previous
incarnation are ignored.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rollart_core.config.resolve import ResolvedRun
from rollart_core.config.validation.consistency import colocates
from rollart_core.errors import TrainerLost, TrainingDiverged
from rollart_core.plugins.manager import plugins
from rollart_core.runtime.remote import Restarts, TrainerGroup
from rollart_core.runtime.validator import Validator
from rollart_core.scheduling.buffer import Buffer
from rollart_core.scheduling.controller import (
    Controller,
    ControllerDependencies,
    EnginesHandle,
    ScoringHandle,
)
from rollart_core.scheduling.curriculum import CurriculumTasks
from rollart_core.scheduling.events import RunStarted, SchedulePolicy, StopKind, StopRun
from rollart_core.scheduling.run_guard import GuardTripped
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.task_mix import Tasks
from rollart_core.store.recorder import CheckpointPlan, RunRecorder
from rollart_core.store.resume import restore_source
from rollart_core.store.run_dir import RunState
from rollart_core.training.guard import Trip
from rollart_core.types import Group, Ticket, Trajectory


@dataclass(frozen=True, slots=True)
class TrainDependencies:
    """The objects that the phase uses."""

    recorder: RunRecorder
    trainer: TrainerGroup
    engines: EnginesHandle
    run_episode: Callable[[Ticket, int], Awaitable[Trajectory]]
    source: Tasks
    """The task source, in its initial state."""
    scoring: ScoringHandle | None = None
    """Frees the slots of episodes that wait for their score; None: they keep their slots."""
    validator: Validator | None = None
    """None if there is no validation."""


class TrainPhase:
    """Runs the loop until a stop condition holds; see the module docstring."""

    def __init__(self, run: ResolvedRun, deps: TrainDependencies) -> None:
        """Connect the components of a run."""
        self._run = run
        self._config = run.config
        self._deps = deps
        self._controller: Controller | None = None
        self._running = False
        self._restoring: asyncio.Task[RunStarted] | None = None
        """Set while the trainer is being restarted."""
        self._failure: BaseException | None = None
        self._stop_reason: str | None = None
        self._stop_kind: StopKind = "requested"
        self._version = 0
        """The trainer's policy version at the end of the last incarnation."""
        self._ends_at_s = math.inf
        failures = run.config.failures
        self._restarts = Restarts(failures.max_restarts, failures.restart_window_s)

    @property
    def running(self) -> bool:
        """True while the phase accepts a request to stop.

        False while the trainer is being restarted, which may take minutes. A run that is ended
        then keeps the results so far, as after a kill.
        """
        return self._running and self._restoring is None

    async def prepare(self, resumed: RunState | None) -> None:
        """Restore the task source, and save the initial weights of RL.

        After this the trainer may die: the weights of a warm start are in a checkpoint.
        """
        source = self._deps.source
        plan = CheckpointPlan(self._deps.trainer.call, source)
        if resumed is not None:
            num_requeued = restore_source(source, resumed, self._deps.recorder.run_dir)
            plan = replace(plan, wall_s=resumed.train_wall_s, num_requeued=num_requeued)
        self._deps.recorder.plan(plan)
        if resumed is None:
            await self._deps.recorder.checkpoint(0)

    async def execute(self, resumed: RunState | None) -> StopRun:
        """Train, from the beginning or from a checkpoint; call ``prepare`` first.

        If the trainer is lost, it is restarted and loads the newest checkpoint; the batches since
        then are rolled back and repeated. If the guard trips, the last good checkpoint is loaded
        and the batches since then are skipped.

        Raises:
            TrainerLost: If the trainer died too often.
            TrainingDiverged: If updates were not finite and the guard is off.
        """
        recorder = self._deps.recorder
        self._ends_at_s = time.monotonic() + self._wall_s_left(resumed)
        recorder.begin_training()
        self._running = True
        try:
            started = await self._resume(resumed) if resumed else RunStarted()
            while True:
                try:
                    return await self._live(started)
                except TrainerLost as e:
                    started = await self._restored(e)
                except GuardTripped as e:
                    started = await self._undo(e.trip, self._version + 2)
                except TrainingDiverged as e:
                    if not recorder.guard.is_on:
                        raise
                    started = await self._undo(_diverged(e, self._version), self._version + 1)
        finally:
            self._running = False

    async def _live(self, started: RunStarted) -> StopRun:
        """Run one incarnation, until the end or until the trainer is lost."""
        deps, config = self._deps, self._config
        policy = schedule_policy(self._run)
        if self._stop_kind == "guard":  # stop because of the guard, even if all batches are done
            policy = replace(policy, num_batches=None)
        else:
            await self._validate_first(started.policy_version)
        scheduler = Scheduler(policy, deps.source)
        controller = self._controller = Controller(
            ControllerDependencies(
                scheduler=scheduler,
                buffer=Buffer(config.rollout.group_size, _capacity(self._run)),
                run_episode=deps.run_episode,
                trainer=deps.trainer,
                engines=deps.engines,
                keep_group=_keep_group,
                recorder=deps.recorder,
                scoring=deps.scoring,
                curriculum=_curriculum(deps.source),
                used_share=self._used_share if config.trainer.schedule.over == "stop" else None,
                drops_equal=config.rollout.equal_groups == "replace",
                validator=deps.validator,
                shares_devices=colocates(config),
            ),
            ticket_s=config.deadlines.ticket_s,
            wall_s=self._seconds_left(),
        )
        if self._stop_reason is not None:
            controller.request_stop(self._stop_reason, self._stop_kind)
        try:
            stop = await controller.run(started)
            if stop.kind != "done":
                # Set before the last checkpoint, in case it fails.
                self._stop_reason, self._stop_kind = stop.reason, stop.kind
            version = scheduler.snapshot().policy_version
            await deps.recorder.checkpoint(version)
            if deps.validator is not None and stop.kind not in ("failures", "guard"):
                await deps.validator.finish(version, deps.engines.load_weights)
            return stop
        finally:
            self._controller = None
            snapshot = scheduler.snapshot()
            self._version = snapshot.policy_version
            deps.recorder.end_incarnation(snapshot)

    async def _resume(self, state: RunState) -> RunStarted:
        """Continue from a loaded checkpoint; complete a rollback that was interrupted."""
        recorder = self._deps.recorder
        if await recorder.goes_on_as(state) == state.policy_version:
            return await recorder.go_back(state, "resumed")
        try:
            return await self._go_on_from(state, "resumed")
        except TrainerLost as e:
            return await self._restored(e)

    async def _undo(self, trip: Trip, as_version: int) -> RunStarted:
        """Go back to the last good checkpoint, and skip the batches trained since then."""
        deps = self._deps
        await deps.recorder.tripped(trip, self._version, as_version)
        try:
            state = await deps.recorder.load_newest(deps.trainer.call)
            return await self._go_on_from(state, f"the guard tripped: {trip.reason}")
        except TrainerLost as e:
            return await self._restored(e)

    async def _validate_first(self, version: int) -> None:
        """Validate the initial version of an incarnation; it may already meet ``stop.when``."""
        validator = self._deps.validator
        if validator is None:
            return
        if validator.is_due(version):
            await validator.validate(version)
        if (reason := validator.stop_reason()) and self._stop_reason is None:
            self._stop_reason = reason

    async def _restored(self, error: TrainerLost) -> RunStarted:
        """Restart the trainer, unless another required worker is lost meanwhile.

        Raises:
            RollartError: If such a worker is lost.
        """
        restoring = self._restoring = asyncio.ensure_future(self._bring_back(error))
        try:
            return await restoring
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from error
        finally:
            self._restoring = None

    async def _bring_back(self, error: TrainerLost) -> RunStarted:
        """Restart the trainer, and go back to the newest checkpoint."""
        deps = self._deps
        while True:
            delay_s = self._restarts.died(time.monotonic())
            deps.recorder.event("trainer_lost", {"reason": str(error)})
            if delay_s is None:
                limit = self._config.failures.max_restarts
                raise TrainerLost(
                    f"{error}; failures.max_restarts ({limit}) are used up"
                ) from error
            deps.recorder.notify(f"The trainer is lost ({error}). It is restarted.")
            await asyncio.sleep(delay_s)
            try:
                await deps.trainer.restart()
                state = await deps.recorder.load_newest(deps.trainer.call)
                return await self._go_on_from(state, f"the trainer was lost: {error}")
            except TrainerLost as e:
                error = e

    async def _go_on_from(self, state: RunState, reason: str) -> RunStarted:
        """Publish the weights that the trainer has loaded, and start an incarnation with them.

        Raises:
            TrainerLost: If the trainer dies meanwhile.
        """
        deps, guard = self._deps, self._deps.recorder.guard
        version = await deps.recorder.goes_on_as(state)
        await deps.trainer.publish(version)
        await deps.engines.load_weights(version)
        started = await deps.recorder.go_back(state, reason)
        if version != state.policy_version:
            await deps.recorder.checkpoint(version)  # later checkpoints continue from this one
            if guard.is_used_up:
                self._stop_reason, self._stop_kind = guard.used_up_reason(), "guard"
        return started

    def _used_share(self, policy_version: int) -> float:
        """Return the used share of ``stop``, in [0, 1]: of batches or time, the larger one."""
        stop, left_s = self._config.stop, self._seconds_left()
        used = [policy_version / stop.batches] if stop.batches else []
        if stop.wall_s is not None and left_s is not None:
            used.append(1 - left_s / stop.wall_s)
        return min(1.0, max(0.0, *used, 0.0))

    def _wall_s_left(self, resumed: RunState | None) -> float:
        wall_s = self._config.stop.wall_s
        if wall_s is None:
            return math.inf
        return max(1.0, wall_s - (resumed.train_wall_s if resumed else 0.0))

    def _seconds_left(self) -> float | None:
        left_s = self._ends_at_s - time.monotonic()
        return None if math.isinf(left_s) else max(0.0, left_s)

    def request_stop(self, reason: str, kind: StopKind) -> None:
        """Request the end of training; the current batch is finished first."""
        self._stop_reason, self._stop_kind = reason, kind
        if self._deps.validator is not None:
            self._deps.validator.cancel()
        if self._controller is not None:
            self._controller.request_stop(reason, kind)

    def fail(self, error: BaseException) -> None:
        """End training with the error of a worker that it requires."""
        if self._controller is not None:
            self._controller.fail(error)
        elif self._restoring is not None and not isinstance(error, TrainerLost):
            self._failure = error
            self._restoring.cancel()


def schedule_policy(run: ResolvedRun) -> SchedulePolicy:
    """Return the limits of the scheduler."""
    config, rollout, failures = run.config, run.config.rollout, run.config.failures
    return SchedulePolicy(
        groups_per_batch=rollout.groups_per_batch,
        group_size=rollout.group_size,
        max_concurrent=rollout.max_concurrent,
        redundant=rollout.redundant,
        mode=config.mode,
        min_group_size=rollout.min_group_size,
        requeues_small=rollout.small_groups == "requeue",
        max_equal_groups=rollout.max_equal_groups if rollout.equal_groups == "replace" else None,
        max_staleness=config.staleness_bound,
        on_stale=getattr(config, "on_stale", "wait"),
        max_retries=failures.max_retries,
        max_failure_rate=failures.max_rate,
        failure_window=failures.window,
        num_batches=config.stop.batches,
        scored_together=frozenset(
            env.name for env in run.envs if env.reward is not None and env.reward.spec.group
        ),
    )


def _diverged(error: TrainingDiverged, version: int) -> Trip:
    return Trip("diverged", math.nan, math.inf, version, str(error))


def _capacity(run: ResolvedRun) -> int:
    rollout = run.config.rollout
    groups = rollout.groups_per_batch * (run.config.staleness_bound + 1)
    return groups * schedule_policy(run).num_members


def _keep_group(group: Group) -> bool:
    return plugins().decide("rollart_filter_group", group=group) is not False


def _curriculum(source: object) -> CurriculumTasks | None:
    return source if isinstance(source, CurriculumTasks) else None
