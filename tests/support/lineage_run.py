"""A run without a model, killed again and again: the program ``FOLDER OPTIONS``.

The scheduler, controller, recorder, journal, checkpoints and validations are the real ones; engine,
trainer and episodes are fakes that take milliseconds. What the fake trainer calls its weights is
the list of all it was ever trained on, so that the final weights tell their own lineage.

Each life is a child of one process that has everything imported. It is killed by itself: before or
after the n-th call of something that writes, or a moment after a random number of all such calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # imported before the children are forked
import yaml

from rollart_core import cli
from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.weights import Publication
from rollart_core.errors import TrainerLost, TrainingDiverged
from rollart_core.runtime.child import die_with_parent
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.runtime.validator import Validator, ValidatorDependencies
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.store import checkpoints, run_dir
from rollart_core.store.journal import Journal, JournalStore
from rollart_core.store.recorder import RunRecorder
from rollart_core.store.resume import check_same_run
from rollart_core.store.run_dir import run_lock
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Failure, FailureKind, Group, Sample, Task, Ticket, Trajectory, Turn

assert pyarrow.parquet

ENV = "rollart_testing:FakeEnv"
NUM_TASKS = 37
CONFIG: dict[str, Any] = {
    "name": "lineage",
    "max_staleness": 1,
    "model": {"kind": "new"},
    "env": ENV,
    "trackers": [],
    "rollout": {"groups_per_batch": 2, "group_size": 2, "max_concurrent": 9},
    "failures": {"max_rate": 1.0, "restart_window_s": 0.001},
    "checkpoint": {"every_batches": 4, "keep_best": "validation/score"},
    "evaluation": {"every_batches": 3, "validation_tasks": 2},
    "stop": {"batches": 1},
}


class FakeTrainer:
    """Its weights are what it was trained on: ``[batch, ticket id, attempt]`` after one another."""

    def __init__(self, rng: random.Random) -> None:
        self.weights: list[list[object]] = []
        self.lost = False
        self.rng = rng
        self.loss_rate = 0.0  # until there is a first checkpoint
        self.diverges = False  # at its next fourth version
        self.lr_factor = 1.0

    async def work(self) -> None:
        if self.rng.random() < self.loss_rate:
            self.lost = True
        if self.lost:
            raise TrainerLost("the trainer process is gone")
        await asyncio.sleep(self.rng.random() * 0.004)

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        await self.work()
        members = [t.ticket for g in groups for t in g.trajectories]
        if self.diverges and policy_version % 4 == 3:
            self.diverges = False
            self.weights += [["diverged"]]
            raise TrainingDiverged("updates in a row were not finite")
        self.weights += [[policy_version, t.ticket_id, t.attempt] for t in members]
        return [TrainStepReport(policy_version + 1, policy_version, {"loss": 0.5})]

    async def publish(self, policy_version: int) -> Publication:
        await self.work()
        return Publication(policy_version, 0, 0.0)

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        raise AssertionError("no warm start here")

    async def restart(self) -> None:
        self.weights, self.lost, self.lr_factor = [], False, 1.0

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await self.work()
        return getattr(self, method)(*args, **kwargs)

    def set_lr_factor(self, factor: float) -> None:
        self.lr_factor = factor

    def save(self, folder: str, *, policy_version: int, train_step: int) -> None:
        path = Path(folder)
        part = path.with_name(f".{path.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        (part / "weights.json").write_text(json.dumps(self.weights))
        with contextlib.suppress(FileNotFoundError):
            for old in path.iterdir():
                old.unlink()
            path.rmdir()
        part.rename(path)

    def load(self, folder: str) -> None:
        self.weights = json.loads((Path(folder) / "weights.json").read_text())


class FakeEngines:
    """They hold a version, and generate with it."""

    def __init__(self) -> None:
        self.version = 0

    async def load_weights(self, policy_version: int) -> Sequence[WeightSwap]:
        await asyncio.sleep(0.001)
        self.version = policy_version
        return []


def episodes(engines: FakeEngines, rng: random.Random, failure_rate: float) -> Callable[..., Any]:
    """Return what runs an episode: some milliseconds, tokens of the version the engines hold."""

    async def run_episode(ticket: Ticket, start_version: int) -> Trajectory:
        await asyncio.sleep(rng.random() ** 3 * 0.02)
        turn = Turn("see", "do", 3, 4, "stop", 0.0, 0.0, 0.0)
        if rng.random() < failure_rate:
            failure = Failure(FailureKind.ENVIRONMENT, "env.step", "boom")
            return Trajectory(ticket, "failed", turns=(turn,), failure=failure)
        row = np.full(7, engines.version, np.int32)
        sample = Sample(row, np.ones(7, np.bool_), row.astype(np.float32), row, row)
        return Trajectory(
            ticket, "finished", (sample,), (turn,), 1.0, 1.0, True, start_version=start_version
        )

    return run_episode


def worth(policy_version: int) -> float:
    """Return the score that weights of a version reach in a validation."""
    return random.Random(policy_version).random()


def validator(run: ResolvedRun, recorder: RunRecorder, engines: FakeEngines) -> Validator:
    """Return one whose episodes score what the weights are worth that the engines hold."""

    async def attempt(version: int, ticket: Ticket) -> Trajectory:
        await asyncio.sleep(0.0005)
        score = worth(engines.version)
        return Trajectory(ticket, "finished", reward=score, score=score, start_version=version)

    tasks = [Task(ENV, "warm", i, i) for i in range(2)]
    return Validator(run.config, ValidatorDependencies(recorder, tasks, attempt))


async def live(run: ResolvedRun, folder: Path, rng: random.Random, rates: dict[str, float]) -> None:
    """One life of the run, from the beginning or from where the last one was cut off."""
    trainer, engines = FakeTrainer(rng), FakeEngines()
    resumes = (folder / "journal.db").exists() and bool(list(folder.glob("checkpoints/v*/run_st*")))
    with run_lock(folder):
        if resumes:
            check_same_run(folder, run.as_dict())
        recorder = RunRecorder(run, folder, NobodyWatches())
        recorder.start()
        state = None
        if resumes:
            state = await recorder.load_newest(trainer.call)
        engines.version = state.policy_version if state else 0
        parts = TrainDependencies(
            recorder=recorder,
            trainer=trainer,
            engines=engines,
            run_episode=episodes(engines, rng, rates["episode"]),
            source=TaskSource(ENV, "train", NUM_TASKS, 0),
            validator=validator(run, recorder, engines),
        )
        stop = None
        try:
            phase = TrainPhase(run, parts)
            await phase.prepare(state)
            trainer.loss_rate, trainer.diverges = rates["trainer"], bool(rates["diverge"])
            stop = await phase.execute(state)
        finally:
            recorder.close({})
    if stop is not None and stop.kind == "done":
        (folder / "final.json").write_text(json.dumps(trainer.weights))


LIMIT_BATCHES = 40
"""A life whose cut point does not come up is killed when it has trained this many."""
CUTS: dict[str, tuple[object, str]] = {
    "commit": (JournalStore, "commit"),
    "shard": (JournalStore, "_write_shard"),
    "taken": (JournalStore, "batch_taken"),
    "trained": (JournalStore, "batch_trained"),
    "back": (JournalStore, "rolled_back"),
    "save": (FakeTrainer, "save"),
    "seal": (checkpoints, "_seal"),
    "state": (run_dir.RunState, "write"),
    "remove": (checkpoints.shutil, "rmtree"),
    "replace": (os, "replace"),
    "rename": (Path, "rename"),
}


def cut_at(name: str, nth: int, *, before: bool, cut: Callable[[], None] | None = None) -> None:
    """Kill this process at the n-th call of what ``name`` stands for.

    Args:
        name: A key of ``CUTS``.
        nth: The call.
        before: Whether before it, or after it.
        cut: What to do instead.
    """
    owner, attribute = CUTS[name]
    original = getattr(owner, attribute)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        is_nth = calls[0] == nth
        if is_nth and before:
            (cut or end)()
        result = original(*args, **kwargs)
        if is_nth and not before:
            (cut or end)()
        return result

    setattr(owner, attribute, counted)


def end() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_after(num_calls: int, delay_s: float) -> None:
    """Kill this process a moment after so many calls of all that writes."""
    calls = itertools.count(1)

    def count() -> None:
        if next(calls) == num_calls:
            threading.Timer(delay_s, end).start()

    for owner, attribute in CUTS.values():
        original = getattr(owner, attribute)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            count()
            return result

        setattr(owner, attribute, counted)


def one_life(
    run: ResolvedRun, folder: Path, seed: int, rates: dict[str, float], kill: Any
) -> tuple[int, str]:
    """Fork a life and see to its end.

    Args:
        run: What to do.
        folder: Where.
        seed: Of what is random in it.
        rates: How often the trainer and episodes fail.
        kill: ``[name, nth, before]``: at a cut point; ``[number, seconds]``: so long after so many
            writes; a path: as soon as it is there; None: it ends by itself.

    Returns:
        Its exit code, negative when it was killed, and ``cut`` if that was at a cut point.
    """
    said, saying = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(os.getppid())
            prepare(kill, lambda: (os.write(saying, b"cut"), end()))
            asyncio.run(live(run, folder, random.Random(seed), rates))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    os.close(saying)
    while isinstance(kill, str) and not os.path.exists(kill):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.002)
    else:
        if isinstance(kill, str):
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(said) as reading:
        return code, reading.read()


def prepare(kill: Any, cut: Callable[[], object]) -> None:
    """In a life: see to its end, if that is a matter of what it does."""
    match kill:
        case [str(name), nth, before]:
            assert Journal.__init__.__kwdefaults__ is not None
            Journal.__init__.__kwdefaults__["rows_per_shard"] = 16  # else one is hardly ever full
            cut_at("trained", LIMIT_BATCHES, before=False)
            cut_at(name, nth, before=before, cut=cut)
        case [num_calls, delay_s]:
            end_after(num_calls, delay_s)


def main(folder: Path, options: dict[str, Any]) -> None:
    """Kill a run as often as asked, let it end, and print what happened."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG | options.get("config", {})))
    endless = resolve_run(load_config(config, ["stop.batches=1000000"]))
    rng = random.Random(options["seed"])
    rates = {"trainer": 0.0, "episode": 0.05, "diverge": 0.0} | options.get("rates", {})
    kills: list[Any] = [*options.get("cuts", []), *options.get("until", [])]
    for _ in range(options.get("kills", 0)):
        kills.append([rng.randrange(1, options["most_writes"]), rng.random() * 0.01])
    ends = [one_life(endless, folder, rng.randrange(2**31), rates, kill) for kill in kills]
    saved = max((int(p.name[1:]) for p in folder.glob("checkpoints/v*")), default=0)
    last = resolve_run(
        load_config(config, [f"stop.batches={max(options.get('batches', 12), saved + 4)}"])
    )
    ends.append(one_life(last, folder, rng.randrange(2**31), rates, None))
    print(json.dumps({"codes": [code for code, _ in ends], "said": [said for _, said in ends]}))


def program() -> None:
    """Be a program whose arguments are a folder and options in JSON."""
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))


def killed_rollart() -> None:
    """Be ``rollart``, killed at the n-th call of what a name stands for: NAME N COMMAND..."""
    name, nth = sys.argv[1:3]
    del sys.argv[1:3]
    cut_at(name, int(nth), before=False)
    cli.main()
