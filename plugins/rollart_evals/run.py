"""Runs one evaluation, from the start or after a kill.

    run, plan -> env workers [+ engines] -> column by column: every task of every environment
                                                     |                          |
                                              episodes.jsonl           report.json, card.md

Takes: a resolved run that is evaluated only, a plan, a folder. Gives: a report, as files and as an
object. Never: trains, counts a failed episode as unsuccessful, repeats a completed episode, or
continues with an environment in which most attempts fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rollart_core.config.model import ModelPath
from rollart_core.config.resolve import ResolvedRun
from rollart_core.config.runtime import RayRuntime
from rollart_core.errors import ConfigError, TooManyFailures
from rollart_core.rollout.baseline import BASELINES
from rollart_core.runtime.inline import InlineRuntime
from rollart_core.runtime.interrupts import interrupts
from rollart_core.runtime.run_envs import RunEnvs
from rollart_core.scheduling.evaluate import clusters_of
from rollart_core.scheduling.failure_rate import RetryBudget
from rollart_core.scheduling.observer import NobodyWatches, RunObserver
from rollart_core.store.estimates import Clusters
from rollart_core.store.run_dir import run_lock
from rollart_core.types import Task, Ticket, Trajectory
from rollart_evals.cells import Cell, cell_of
from rollart_evals.episodes import Episode, EpisodeLog
from rollart_evals.plan import GREEDY, EvalPlan
from rollart_evals.report import EvaluationReport, model_hash, write_report

NO_ORACLE = "it has no oracle()"
NO_SOLUTION = "it has no solve()"


def run_evaluation(
    run: ResolvedRun, plan: EvalPlan, folder: Path, *, observer: RunObserver | None = None
) -> EvaluationReport:
    """Play a plan on this machine and wait for the end.

    Args:
        run: The model and the environments, resolved with ``trains=False``.
        plan: The plan to play.
        folder: Folder of the results. Episodes in it are not played again.
        observer: Receives progress reports.

    Raises:
        ConfigError: If the evaluation cannot run.
        TooManyFailures: If most attempts of the model fail in every environment. The played
            episodes are kept.
        KeyboardInterrupt: If interrupted.
    """
    if isinstance(run.config.runtime, RayRuntime):
        raise ConfigError("runtime.kind: an evaluation runs on one machine: use runtime=inline")
    return asyncio.run(_Evaluation(run, plan, folder, observer or NobodyWatches()).execute())


@dataclass(slots=True)
class _Played:
    """The progress of one player in one environment."""

    column: str
    env: str
    last: deque[bool]
    """For each of the last attempts, whether it failed."""
    why: str = ""
    """Why it cannot play, or was stopped."""
    stopped: bool = False
    tickets: list[Ticket] = field(default_factory=list)


class _Evaluation:
    def __init__(
        self, run: ResolvedRun, plan: EvalPlan, folder: Path, observer: RunObserver
    ) -> None:
        self._run, self._config, self._plan = run, run.config, plan
        self._folder, self._observer = folder, observer
        self._envs = RunEnvs(run)
        self._began = time.perf_counter()
        self._played: list[_Played] = []
        self._gate = asyncio.Semaphore(self._config.rollout.max_concurrent)
        self._lacks: dict[str, str] = {}
        """Environment -> reason why its oracle cannot play."""
        self._num_tasks: dict[str, int] = {}
        self._clusters: Clusters = {}

    async def execute(self) -> EvaluationReport:
        with run_lock(self._folder), EpisodeLog(self._folder) as log:
            runtime = InlineRuntime(self._run, self._folder)
            with interrupts():
                try:
                    await self._start(runtime, log)
                    for column in self._plan.columns:
                        await self._play_column(column, log)
                finally:
                    await asyncio.shield(asyncio.ensure_future(_end(self._envs, runtime)))
            log.sync()
            report = self._report(log.episodes)
        write_report(self._folder, report)
        return report

    async def _start(self, runtime: InlineRuntime, log: EpisodeLog) -> None:
        self._observer.phase("set up", str(self._folder))
        envs = await runtime.start_envs()
        await self._envs.count_tasks(envs)
        for env in self._run.envs:
            if "oracle" in self._plan.columns and not await self._envs.has_oracle(env, envs):
                is_agent = self._envs.is_agent(env.name)
                self._lacks[env.name] = NO_SOLUTION if is_agent else NO_ORACLE
        self._played = [
            self._cell(column, number, env.name)
            for column in self._plan.columns
            for number, env in enumerate(self._run.envs)
        ]
        tasks = (ticket.task for cell in self._played for ticket in cell.tickets)
        self._clusters = clusters_of(tasks, self._envs.cluster_of)
        # A resumed evaluation may have no episodes left for a model.
        asks = any(_todo(cell, log) for cell in self._played if cell.column not in BASELINES)
        engine = await runtime.start_engines(self._model_path) if asks else None
        self._envs.wire(envs, engine, self._model_path)
        await self._envs.open()

    async def _play_column(self, column: str, log: EpisodeLog) -> None:
        cells = [cell for cell in self._played if cell.column == column]
        todo = [(cell, ticket) for cell in cells for ticket in _todo(cell, log)]
        total = sum(len(cell.tickets) for cell in cells)
        before = f", {total - len(todo)} of them before" if len(todo) < total else ""
        self._observer.phase(f"evaluate, {column}", f"{total} episodes{before}")
        progress = _Progress(self._observer, total, total - len(todo))
        jobs = [asyncio.ensure_future(self._play(c, t, log, progress)) for c, t in todo]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        stopped = [cell for cell in cells if cell.stopped]
        if stopped and len(stopped) == len(cells) and column not in BASELINES:
            raise TooManyFailures(stopped[0].why)

    def _cell(self, column: str, number: int, env: str) -> _Played:
        cell = _Played(column, env, deque(maxlen=self._config.failures.window))
        quota, attempts = self._plan.quotas[env], self._plan.attempts(column, env)
        tasks = self._envs.held_out(env, quota.tasks)
        self._num_tasks[env] = len(tasks)
        if column == "oracle":
            cell.why = self._lacks.get(env, "")
        if not cell.why:
            cell.tickets = _tickets(f"eval-{column}-{number}", tasks, attempts)
        return cell

    async def _play(
        self, cell: _Played, ticket: Ticket, log: EpisodeLog, progress: _Progress
    ) -> None:
        """Play a ticket until an attempt completes or too many have failed."""
        async with self._gate:
            budget, max_retries = RetryBudget(), self._config.failures.max_retries
            while not cell.stopped:
                attempt = log.attempts[ticket.ticket_id]
                trajectory = await self._attempt(cell.column, replace(ticket, attempt=attempt))
                episode, failure = log.add(cell.column, trajectory), trajectory.failure
                if failure is None or not failure.is_infrastructure:
                    self._watch(cell, episode)
                if failure and failure.retryable and budget.take(failure, max_retries):
                    continue
                progress.took(episode)
                return

    async def _attempt(self, column: str, ticket: Ticket) -> Trajectory:
        if column in BASELINES:
            return await self._envs.play_baseline(ticket, column)
        temperature = 0.0 if column == GREEDY else None
        return await self._envs.run_episode(ticket, 0, temperature=temperature)

    def _watch(self, cell: _Played, episode: Episode) -> None:
        """Stop a cell if too many of its last attempts failed."""
        limits = self._config.failures
        cell.last.append(episode.failed)
        rate = sum(cell.last) / len(cell.last)
        if len(cell.last) == limits.window and rate > limits.max_rate and not cell.stopped:
            cell.stopped = True
            cell.why = (
                f"{rate:.0%} of the last {len(cell.last)} attempts failed, above "
                f"failures.max_rate ({limits.max_rate:.0%}); the last: {episode.why}"
            )
            self._observer.message(f"{cell.column} in {cell.env}: {cell.why}")

    @property
    def _model_path(self) -> str:
        model = self._config.model
        return model.path if isinstance(model, ModelPath) and self._plan.has_model else ""

    def _report(self, episodes: list[Episode]) -> EvaluationReport:
        says = {e.env for e in episodes if e.success is not None}
        cells = [self._cell_of(played, episodes, says) for played in self._played]
        cells += [
            Cell(name, column, why=why)
            for name, why in self._plan.left_out.items()
            for column in self._plan.columns
        ]
        is_here = self._run.engine.spec.follows_training
        return EvaluationReport(
            run=self._run,
            plan=self._plan,
            run_dir=str(self._folder),
            model_path=self._model_path,
            wall_s=time.perf_counter() - self._began,
            cells=tuple(cells),
            episodes=tuple(episodes),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            num_tasks=self._num_tasks,
            clusters=self._clusters,
            model_hash=model_hash(self._model_path) if is_here else None,
        )

    def _cell_of(self, played: _Played, episodes: list[Episode], says: set[str]) -> Cell:
        env, column = played.env, played.column
        own = [e for e in episodes if e.env == env and e.column == column]
        attempts = self._plan.attempts(column, env)
        told = env in says
        cell = cell_of(env, column, own, attempts, says_success=told, clusters=self._clusters)
        return replace(cell, why=played.why) if played.why else cell


class _Progress:
    """Reports the progress of a column to an observer."""

    def __init__(self, observer: RunObserver, total: int, done: int) -> None:
        self._observer, self._total, self._done = observer, total, done
        self._wins = self._ended = 0

    def took(self, episode: Episode) -> None:
        """Count a completed episode."""
        self._done += 1
        line = {"episodes": float(self._done)}
        if not episode.failed:
            self._ended, self._wins = self._ended + 1, self._wins + bool(episode.success)
        if self._ended:
            line["success"] = self._wins / self._ended
        self._observer.progress(self._done / self._total, line)


def _todo(cell: _Played, log: EpisodeLog) -> list[Ticket]:
    """Return the tickets of a cell without a completed episode."""
    return [ticket for ticket in cell.tickets if ticket.ticket_id not in log.finished]


def _tickets(name: str, tasks: list[Task], attempts: int) -> list[Ticket]:
    groups = [f"{name}-{number:06d}" for number in range(len(tasks))]
    pairs = partial(zip, groups, tasks, strict=True)
    return [Ticket(f"{g}.{i}", task, g, i) for i in range(attempts) for g, task in pairs()]


async def _end(envs: RunEnvs, runtime: InlineRuntime) -> None:
    await envs.close()
    await runtime.close()
