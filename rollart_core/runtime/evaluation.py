"""One evaluation from beginning to end: engines and environments up, every task played, a report.

    resolved run -> engines (no trainer) + env workers -> sampled -> [greedy] -> report.json
                                                              |
                                                      episodes.jsonl, one line each

Takes: a resolved run whose model is only to be scored. Gives: an :class:`EvaluationReport`, on
paper and as an object. Never: trains, counts a failed episode as unsuccessful, or goes on when most
attempts fail.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rollart_core.config import ModelPath, RayRuntime
from rollart_core.engine.evaluate import EvaluationResult, evaluate
from rollart_core.engine.observer import NobodyWatches, RunObserver
from rollart_core.engine.run_dir import new_run_dir, write_json
from rollart_core.engine.run_lock import run_lock
from rollart_core.errors import ConfigError, TooManyFailures
from rollart_core.resolve import ResolvedRun
from rollart_core.runtime.inline import InlineRuntime
from rollart_core.runtime.run_envs import RunEnvs
from rollart_core.types import FailureKind, Task, Ticket, Trajectory

EPISODES = "episodes.jsonl"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What a model is worth on held-out tasks."""

    run_dir: str
    model: str
    """What was scored: a path, or what the engine says of it."""
    wall_s: float
    sampled: EvaluationResult
    greedy: EvaluationResult | None
    num_attempts: int
    failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> attempts that failed; most were made again."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """``prompt`` and ``new``, over all attempts."""
    why_failed: str = ""
    """The commonest failure, where there was one."""

    @property
    def ok(self) -> bool:
        """False when no episode came to an end."""
        return self.sampled.success.n > 0

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        by_env = {name: one.as_dict() for name, one in self.sampled.by_env.items()}
        return {
            "ok": self.ok,
            "run_dir": self.run_dir,
            "model": self.model,
            "wall_s": self.wall_s,
            **self.sampled.as_dict(),
            "greedy": self.greedy.as_dict() if self.greedy else None,
            "attempts": self.num_attempts,
            "failures": dict(self.failures),
            "why_failed": self.why_failed,
            "tokens": dict(self.tokens),
            "envs": by_env,
        }


def run_evaluation(run: ResolvedRun, *, observer: RunObserver | None = None) -> EvaluationReport:
    """Score a model on this machine and wait for the end.

    Args:
        run: What to score, on what; resolved with ``trains=False``.
        observer: Who watches.

    Raises:
        ConfigError: When it cannot be.
        TooManyFailures: When most attempts fail; what was played is kept.
        KeyboardInterrupt: When interrupted.
    """
    if isinstance(run.config.runtime, RayRuntime):
        raise ConfigError("runtime.kind: an evaluation runs on one machine: say runtime=inline")
    return asyncio.run(_Evaluation(run, observer or NobodyWatches()).execute())


class _Attempts:
    """Counts attempts, writes each down, and stops when too many of the last ones failed."""

    def __init__(self, run: ResolvedRun, file: IO[str]) -> None:
        self._limits = run.config.failures
        self._file = file
        self._last: deque[bool] = deque(maxlen=self._limits.window)
        self.num_attempts = 0
        self.failures: Counter[str] = Counter()
        self.whys: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def take(self, kind: str, trajectory: Trajectory) -> None:
        """Take one attempt.

        Raises:
            TooManyFailures: See the class.
        """
        failure = trajectory.failure
        self.num_attempts += 1
        self._last.append(failure is not None)
        if failure is not None:
            self.failures[failure.kind] += 1
            self.whys[failure.message] += 1
        for turn in trajectory.turns:
            self.tokens.update(prompt=turn.num_prompt_tokens, new=turn.num_new_tokens)
        self._file.write(json.dumps(_line(kind, trajectory), ensure_ascii=False) + "\n")
        rate = sum(self._last) / len(self._last)
        if len(self._last) == self._limits.window and rate > self._limits.max_rate:
            raise TooManyFailures(
                f"{rate:.0%} of the last {len(self._last)} attempts failed, above "
                f"failures.max_rate ({self._limits.max_rate:.0%}); most often: {self.why}"
            )

    @property
    def why(self) -> str:
        """The commonest failure."""
        return self.whys.most_common(1)[0][0] if self.whys else ""


class _Evaluation:
    def __init__(self, run: ResolvedRun, observer: RunObserver) -> None:
        self._run, self._config, self._observer = run, run.config, observer
        self._envs = RunEnvs(run)
        self._began = time.perf_counter()

    async def execute(self) -> EvaluationReport:
        run_dir = new_run_dir(self._config.runs_dir, self._config.name)
        (run_dir / "config.yaml").write_text(self._run.to_yaml(), encoding="utf-8")
        with run_lock(run_dir), (run_dir / EPISODES).open("w", encoding="utf-8") as file:
            attempts = _Attempts(self._run, file)
            runtime = InlineRuntime(self._run, run_dir)
            with _interrupts():
                try:
                    report = await self._execute(runtime, run_dir, attempts)
                finally:
                    await asyncio.shield(asyncio.ensure_future(_end(self._envs, runtime)))
        write_json(run_dir / "report.json", report.as_dict())
        return report

    async def _execute(
        self, runtime: InlineRuntime, run_dir: Path, attempts: _Attempts
    ) -> EvaluationReport:
        self._observer.phase("set up", str(run_dir))
        model = self._config.model
        path = model.path if isinstance(model, ModelPath) else ""
        envs = await runtime.start_envs()
        await self._envs.count_tasks(envs)
        router = await runtime.start_engines(path)
        self._envs.wire(envs, router, path)
        await self._envs.open()
        config = self._config.evaluation
        tasks = self._envs.tasks("evaluation_split", config.tasks)
        sampled = await self._play("sampled", tasks * config.samples_per_task, None, attempts)
        greedy = await self._play("greedy", tasks, 0.0, attempts) if config.greedy else None
        return EvaluationReport(
            run_dir=str(run_dir),
            model=path or str(self._run.engine.options.get("base_url", self._run.engine.spec.id)),
            wall_s=time.perf_counter() - self._began,
            sampled=sampled,
            greedy=greedy,
            num_attempts=attempts.num_attempts,
            failures=dict(attempts.failures),
            tokens=dict(attempts.tokens),
            why_failed=attempts.why,
        )

    async def _play(
        self, kind: str, tasks: list[Task], temperature: float | None, attempts: _Attempts
    ) -> EvaluationResult:
        self._observer.phase(f"evaluate, {kind}", f"{len(tasks)} episodes")
        done = wins = 0

        async def attempt(ticket: Ticket) -> Trajectory:
            nonlocal done, wins
            trajectory = await self._envs.run_episode(ticket, 0, temperature=temperature)
            attempts.take(kind, trajectory)
            if trajectory.failure is None:
                done, wins = done + 1, wins + bool(trajectory.success)
                line = {"episodes": done, "success": wins / done}
                self._observer.progress(done / len(tasks), line)
            return trajectory

        return await evaluate(
            tasks,
            attempt,
            name=f"eval-{kind}",
            max_concurrent=self._config.rollout.max_concurrent,
            max_retries=self._config.failures.max_retries,
        )


async def _end(envs: RunEnvs, runtime: InlineRuntime) -> None:
    await envs.close()
    await runtime.close()


def _line(kind: str, trajectory: Trajectory) -> dict[str, object]:
    """Return one attempt as it is written down."""
    ticket, failure = trajectory.ticket, trajectory.failure
    return {
        "ticket": ticket.ticket_id,
        "attempt": ticket.attempt,
        "kind": kind,
        "env": ticket.task.env_id,
        "split": ticket.task.split,
        "task": ticket.task.index,
        "status": trajectory.status,
        "success": trajectory.success,
        "score": trajectory.score,
        "reward": trajectory.reward,
        "failure": {"kind": FailureKind(failure.kind).value, "why": failure.message}
        if failure
        else None,
        "wall_s": round(trajectory.wall_s, 3),
        "turns": [
            {"observation": t.observation, "action": t.action, "finish": t.finish_reason}
            for t in trajectory.turns
        ],
    }


@contextmanager
def _interrupts() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end everything in order."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    told: list[signal.Signals] = []
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, main.cancel)
            told.append(number)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in told:
            loop.remove_signal_handler(number)
