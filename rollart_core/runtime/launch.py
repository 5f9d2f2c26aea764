"""One run from beginning to end: set up, warm start, evaluate, train, evaluate, report.

    resolved run -> model -> engines + trainer -> [warm start] -> evaluate -> controller -> evaluate
                                                                                |          |
                                      journal, shards, checkpoints, trackers, validations  |
                                                              the best weights, or the last ones

Takes: a resolved run. Gives: a report, in ``report.json`` and as an object. Never: leaves anything
running, however the run ends. The controller trains; this module does not.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.resolve import ResolvedRun
from rollart_core.config.run import WarmStart
from rollart_core.errors import RollartError, TooManyFailures, TrainerLost
from rollart_core.inference.router import Router, combined
from rollart_core.inference.teacher import RunEpisode
from rollart_core.plugins import registry
from rollart_core.runtime.elastic import Elastic
from rollart_core.runtime.garbage_collection import short_gc_pauses
from rollart_core.runtime.inline import InlineRuntime
from rollart_core.runtime.interrupts import PREEMPTED, STOP_HINTS, interrupts
from rollart_core.runtime.placement import RunPlan
from rollart_core.runtime.remote import TrainerGroup
from rollart_core.runtime.report import Routed, RunReport, env_reports, score_gain, whereabouts
from rollart_core.runtime.run_envs import RunEnvs
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.runtime.validator import (
    ModelDependencies,
    TrainedModel,
    Validator,
    ValidatorDependencies,
)
from rollart_core.runtime.workers import WorkersRuntime
from rollart_core.scheduling.curriculum import CurriculumTasks
from rollart_core.scheduling.evaluate import EvaluationResult, evaluate, within
from rollart_core.scheduling.events import StopRun
from rollart_core.scheduling.failure_rate import Attempts
from rollart_core.scheduling.observer import NobodyWatches, RunObserver
from rollart_core.store.recorder import Evaluations, RunRecorder
from rollart_core.store.resume import check_resume
from rollart_core.store.run_dir import RunState, new_run_dir, run_lock, write_json
from rollart_core.training.cross_check import NUM_ANSWERS, check_agreement
from rollart_core.training.warm_start import WarmStartDependencies, WarmStartResult, warm_start
from rollart_core.types import Sample, Task, Ticket, Trajectory

NUM_CORPUS_TASKS = 400
"""Number of tasks whose text a new tokenizer is trained on."""
NUM_DEMONSTRATED_TASKS = 1_000_000
"""Maximum number of demonstrated tasks, taken in a seeded order; larger than any run needs."""


def launch(
    run: ResolvedRun, *, resume: Path | None = None, observer: RunObserver | None = None
) -> RunReport:
    """Execute a run and wait for its end.

    Args:
        run: The resolved run.
        resume: A run directory to continue in, from its newest checkpoint.
        observer: Receives phases, progress and messages.

    Raises:
        UserError: If the run cannot start.
        KeyboardInterrupt: If it is interrupted before there is anything to report.
        SystemExit: If it is preempted before or after training.
        RollartError: If a worker is lost for good. All workers are stopped; the files are kept.
    """
    return asyncio.run(_Launch(run, resume, observer or NobodyWatches()).execute())


class _Launch:
    """The phases of one run and the state that they share."""

    def __init__(self, run: ResolvedRun, resume: Path | None, observer: RunObserver) -> None:
        self._run = run
        self._config = run.config
        self._observer = observer
        self._resume = resume
        self._began = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._training: TrainPhase | None = None
        self._interrupted = ""
        self._warm: WarmStartResult | None = None
        self._envs = RunEnvs(run)
        self._first_attempts = Attempts(run.config.failures.window)
        self._answers: list[Sample] = []
        self._cross_check: dict[str, float] | None = None
        self._plan: RunPlan | None = None
        self._routed: Routed = {}

    async def execute(self) -> RunReport:
        if self._resume is not None:
            check_resume(self._resume, self._run.as_dict())
            run_dir = self._resume
        else:
            run_dir = new_run_dir(self._config.runs_dir, self._config.name)
            (run_dir / "config.yaml").write_text(self._run.to_yaml(), encoding="utf-8")
        with run_lock(run_dir):
            return await self._execute(run_dir)

    async def _execute(self, run_dir: Path) -> RunReport:
        runtime = new_runtime(self._run, run_dir)
        recorder = RunRecorder(self._run, run_dir, self._observer)
        runtime.notify = recorder.event
        runtime.on_lost = self._fail
        scoring = self._envs.scoring
        scoring.on_event = recorder.event
        recorder.gauges = lambda: {**runtime.gauges(), **scoring.metrics()}
        elastic = Elastic(runtime, self._config.scaling, recorder.event)
        report: RunReport | None = None
        with interrupts(self._ends_in_order), ExitStack() as until_end:
            try:
                recorder.start()
                await elastic.open(run_dir)
                report = await self._phases_of(runtime, recorder, run_dir, until_end)
                return report
            finally:
                try:
                    ending = _end(elastic, self._envs, runtime)
                    await asyncio.shield(asyncio.ensure_future(ending))
                finally:
                    recorder.close(report.as_dict() if report else {"ok": False})

    async def _phases_of(
        self, runtime: WorkersRuntime, recorder: RunRecorder, run_dir: Path, until_end: ExitStack
    ) -> RunReport:
        async with self._phase("set up", str(run_dir)):
            plan = self._plan = RunPlan(self._run, recorder.event)
            placement = plan.begin(await runtime.connect())
            await runtime.place(placement)
            envs = await runtime.start_envs()
            await self._envs.count_tasks(envs)
            if self._resume is None:
                self._envs.check_evaluation()
            model_path = await self._model(runtime, run_dir)
            router, trainer = await runtime.start_model(model_path)
            router.place(placement)
            router.on_lost = trainer.on_lost = self._fail
            self._routed = router.counts.by_pool
            self._envs.wire(envs, router, model_path)
            recorder.row_note = self._envs.row_note
            await self._envs.open()
        until_end.enter_context(short_gc_pauses())
        state = await self._begin(runtime, router, trainer, recorder, model_path)
        source = self._envs.source()
        if isinstance(source, CurriculumTasks):
            of_parts = recorder.gauges
            recorder.gauges = lambda: {**of_parts(), **source.gauges()}
        training = self._training = TrainPhase(
            self._run,
            TrainDependencies(
                recorder=recorder,
                trainer=trainer,
                engines=router,
                run_episode=plan.watched(await self._episodes(runtime, recorder), router),
                source=source,
                scoring=self._envs.scoring,
                validator=self._validator(recorder),
            ),
        )
        await training.prepare(state)
        before = await self._before(recorder, state)
        await self._compare(trainer, recorder)
        router.check()  # without an engine, each episode would fail
        async with self._phase("train", self._train_detail()):
            try:
                stop = await training.execute(state)
            finally:
                await plan.close()
        engine = combined(await router.stats())
        parts = ModelDependencies(recorder, trainer, router, self._observer.message)
        model = TrainedModel(self._config, parts)
        after: Evaluations = (None, None)
        if stop.kind != "preempted":  # then the checkpoint is all that there is time for
            await model.settle()
            if not self._interrupted and stop.kind != "failures":
                after = await self._evaluate("after")
            async with self._phase("save"):
                await model.export(model_path)
        report = self._report(recorder, run_dir, stop, (before, after), asdict(engine))
        report = replace(report, **model.facts())
        write_json(run_dir / "report.json", report.as_dict())
        return report

    async def _episodes(self, runtime: WorkersRuntime, recorder: RunRecorder) -> RunEpisode:
        """Return the function that executes the tickets of training."""
        envs = self._envs
        run = envs.demonstrate if self._run.demonstrates else envs.run_episode
        episodes: RunEpisode = partial(run, on_cancel=recorder.cancelled)
        if self._config.teacher is None:
            return episodes
        teacher = await runtime.start_teacher()
        return teacher.after(episodes)

    def _validator(self, recorder: RunRecorder) -> Validator | None:
        """Return the validator of training; None if there is no validation."""
        evaluation = self._config.evaluation
        if evaluation.every_batches is None:
            return None
        tasks = self._envs.validation_tasks()
        if len(tasks) < evaluation.validation_tasks:
            wanted = evaluation.validation_tasks
            self._observer.message(
                f"Validations use {len(tasks)} tasks instead of {wanted}: the split has no more "
                "tasks, or more than a fifth of the training tasks would be held out."
            )
        parts = ValidatorDependencies(recorder, tasks, self._attempt, self._envs.cluster_of)
        return Validator(self._config, parts)

    def _fail(self, error: RollartError) -> None:
        """End training; outside training, the next call to the lost worker fails."""
        if self._training is not None:
            self._training.fail(error)

    # Set-up

    async def _model(self, runtime: WorkersRuntime, run_dir: Path) -> str:
        model = self._config.model
        if isinstance(model, ModelPath):
            return model.path
        existing = run_dir / "model"
        if self._resume and existing.exists():
            return str(existing)
        assert isinstance(model, NewModel)
        tasks = self._envs.tasks("split", max(NUM_CORPUS_TASKS, len(self._run.envs)))
        return await runtime.build_model(model, tasks)

    # Before RL

    async def _begin(
        self,
        runtime: WorkersRuntime,
        router: Router,
        trainer: TrainerGroup,
        recorder: RunRecorder,
        model_path: str,
    ) -> RunState | None:
        """Load the initial weights of RL into trainer and engines; return the resumed state."""
        state: RunState | None = None
        if self._resume is not None:
            state = await recorder.load_newest(trainer.call)
        elif self._config.warm_start is not None:
            async with self._phase("warm start", "supervised steps on the oracle's episodes"):
                await self._warm_start(runtime, router, trainer, model_path)
                if self._run.beside.warms_whole:
                    await trainer.call("begin_adapters")
        version = state.policy_version if state else 0
        await trainer.publish(version)
        await router.load_weights(version)
        return state

    async def _warm_start(
        self,
        runtime: WorkersRuntime,
        router: Router,
        trainer: TrainerGroup,
        model_path: str,
    ) -> None:
        config = self._config.warm_start
        assert config is not None
        num_tasks = min(NUM_DEMONSTRATED_TASKS, config.max_train_steps * config.batch_size)
        tasks = self._envs.tasks("split", max(num_tasks, len(self._run.envs)))
        checks = self._envs.tasks("check_split", config.check_tasks)

        async def check(step: int) -> float:
            version = step - config.max_train_steps - 1  # below 0: RL begins at version 0
            await trainer.publish(version)
            await router.load_weights(version)
            run = partial(self._attempt, version)
            result = await evaluate(
                checks, run, name=f"warm{step}", max_concurrent=self._config.rollout.max_concurrent
            )
            return result.success.mean

        def progress(line: Mapping[str, float]) -> None:
            fraction = line["train_step"] / config.max_train_steps
            of_time = line["wall_s"] / config.max_wall_s if config.max_wall_s else 0.0
            self._observer.progress(max(fraction, of_time), line)

        take = await runtime.start_demonstrator(model_path, tasks)
        self._warm = await warm_start(config, WarmStartDependencies(take, trainer, check, progress))
        await runtime.stop_demonstrator()
        if not self._warm.reached:
            self._observer.message(_fell_short(self._warm, config))

    async def _attempt(
        self, version: int, ticket: Ticket, temperature: float | None = None
    ) -> Trajectory:
        return await self._envs.run_episode(ticket, version, temperature=temperature)

    async def _first_attempt(self, ticket: Ticket, temperature: float | None) -> Trajectory:
        """Play one attempt before training, and stop the run if most attempts fail.

        Raises:
            TooManyFailures: If the failure rate exceeds ``failures.max_rate``, as in training.
        """
        trajectory = await self._attempt(0, ticket, temperature)
        if temperature is None and len(self._answers) < NUM_ANSWERS:
            self._answers += [s for s in trajectory.samples if s.num_loss_tokens]
        self._first_attempts.add(ticket.task.env_id, trajectory.failure)
        if why := self._first_attempts.excess(self._config.failures.max_rate):
            raise TooManyFailures(f"evaluation before training: {why}")
        return trajectory

    async def _before(self, recorder: RunRecorder, state: RunState | None) -> Evaluations:
        """Return the evaluation of the initial weights; a resumed run has it in its journal."""
        tasks = self._envs.tasks("evaluation_split", self._config.evaluation.tasks)
        if known := recorder.evaluation(tasks):
            return known
        if state is not None and state.policy_version > 0:
            return None, None
        results = await self._evaluate("before")
        recorder.evaluated(tasks, results)
        return results

    async def _compare(self, trainer: TrainerGroup, recorder: RunRecorder) -> None:
        """Compare the logprobs of the first answers in trainer and engine.

        Raises:
            LogprobMismatch: If they differ too much.
        """
        answers, self._answers = self._answers[:NUM_ANSWERS], []
        if not answers or self._run.demonstrates:
            why = "no answers of the engine's policy were sampled before training"
            self._observer.message(f"trainer and engine are not compared: {why}")
            return
        async with self._phase("cross-check", f"{len(answers)} answers in trainer and engine"):
            try:
                figures = self._cross_check = await trainer.compare(answers)
            except TrainerLost:
                return  # the RL phase restarts it
        recorder.event("cross_check", figures)
        self._observer.message(
            f"trainer and engine: logprobs differ by {figures['mean']:.2g} nats per token"
        )
        check_agreement(figures, self._config.trainer.max_logprob_mismatch)

    async def _evaluate(self, when: str) -> Evaluations:
        config = self._config.evaluation
        tasks = self._envs.tasks("evaluation_split", config.tasks)
        kinds: list[tuple[str, list[Task], float | None]] = [
            ("sampled", tasks * config.samples_per_task, None)
        ]
        if config.greedy:
            kinds.append(("greedy", tasks, 0.0))
        results: list[EvaluationResult] = []
        attempt = self._first_attempt if when == "before" else partial(self._attempt, 0)
        for kind, repeated, temperature in kinds:
            async with self._phase(f"evaluate {when}", f"{len(repeated)} tasks, {kind}"):
                # The name is the same before and after, so both use the same random numbers. This
                # reduces the variance of the paired difference.
                result = await evaluate(
                    repeated,
                    partial(attempt, temperature=temperature),
                    name=f"eval-{kind}",
                    max_concurrent=self._config.rollout.max_concurrent,
                    cluster_of=self._envs.cluster_of,
                )
            result = within(result, {env.name: env.score_range for env in self._run.envs})
            results.append(result)
            parts = {"": result, **{f"{name}: ": one for name, one in result.by_env.items()}}
            for name, one in parts.items():
                self._observer.message(f"{when}: {name}{kind}{_said(one)}")
        return results[0], results[1] if len(results) > 1 else None

    # RL

    def _train_detail(self) -> str:
        stop = self._config.stop
        limits = [f"{stop.batches} batches"] if stop.batches else []
        limits += [f"{stop.wall_s:g} s"] if stop.wall_s else []
        limits += ["stop.when"] if stop.when else []
        return f"{self._config.algorithm.id}, until " + " or ".join(limits)

    # The end

    def _report(
        self,
        recorder: RunRecorder,
        run_dir: Path,
        stop: StopRun,
        evaluations: tuple[Evaluations, Evaluations],
        engine: Mapping[str, object],
    ) -> RunReport:
        (before, greedy_before), (after, greedy_after) = evaluations
        placement = self._plan.placement if self._plan else None
        return RunReport(
            run_dir=str(run_dir),
            name=self._config.name,
            stop_reason=stop.reason,
            ok=not self._interrupted and stop.kind not in ("failures", "guard"),
            wall_s=recorder.earlier_s + time.perf_counter() - self._began,
            before=before,
            after=after,
            greedy_before=greedy_before,
            greedy_after=greedy_after,
            score_gain=score_gain((before, after)),
            phases_s=self._phases,
            warm_start=asdict(self._warm) if self._warm else None,
            cross_check=self._cross_check,
            engine={k: v for k, v in engine.items() if isinstance(v, int | float)},
            placement=asdict(placement) if placement else {},
            envs=env_reports(
                self._run,
                recorder.totals_by_env(),
                (before, after),
                whereabouts(self._run, placement, self._routed),
            ),
            rewards=self._envs.scoring.totals(),
            **recorder.totals(),
        )

    @asynccontextmanager
    async def _phase(self, name: str, detail: str = "") -> AsyncIterator[None]:
        self._observer.phase(name, detail)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._phases[name] = self._phases.get(name, 0.0) + took

    def _ends_in_order(self, reason: str) -> bool:
        """Request an orderly stop at the first signal during training; False otherwise.

        A cluster may repeat the signal of a preemption while the checkpoint is written.
        """
        if reason == self._interrupted == PREEMPTED:
            return True
        training = self._training
        if training is None or not training.running or self._interrupted:
            if reason == PREEMPTED:
                self._observer.message("The run is preempted outside of training: it stops now.")
            return False
        self._interrupted = reason
        self._observer.message(f"Stopping after the current batch. {STOP_HINTS[reason]}")
        training.request_stop(reason, "preempted" if reason == PREEMPTED else "requested")
        return True


def new_runtime(run: ResolvedRun, run_dir: Path) -> WorkersRuntime:
    """Return the runtime of a run without starting anything."""
    if run.config.runtime.kind == "inline":
        return InlineRuntime(run, run_dir)
    runtime: WorkersRuntime = registry.resolve("runtimes", run.config.runtime.kind)(run, run_dir)
    return runtime


async def _end(elastic: Elastic, envs: RunEnvs, runtime: WorkersRuntime) -> None:
    await elastic.close()
    await envs.close()
    await runtime.close()


def _said(result: EvaluationResult) -> str:
    if not result.score.n:
        return f": all {result.num_failed} episodes failed"
    success = f" success {result.success.mean:.1%}," if result.success.n else ""
    return f"{success} score {result.score.mean:.3f}"


def _fell_short(result: WarmStartResult, config: WarmStart) -> str:
    came = "without a check (its loss stayed too high for one)"
    if not math.isnan(result.success):
        came = f"at {result.success:.0%} sampled success"
    key = "max_train_steps" if result.train_steps == config.max_train_steps else "max_wall_s"
    return (
        f"The warm start ended {came} after {result.train_steps} train steps, below "
        f"warm_start.until_success ({config.until_success:.0%}). RL starts now. To train longer, "
        f"raise warm_start.{key}."
    )
