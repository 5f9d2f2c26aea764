"""A real controller over episodes in boxes, whose env worker is killed: nothing is lost or left."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.busy_sandbox import TURNS
from support.sandbox_types import HELD, IN_DOCKER, missing

from rollart_core.config.model import NewModel
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.contracts.weights import Publication
from rollart_core.inference.router import Router
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, EnvWorkerHandle, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import EpisodeDependencies, EpisodeLimits, run_episode
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import RemoteWorker
from rollart_core.scheduling.buffer import Buffer
from rollart_core.scheduling.controller import Controller, ControllerDependencies
from rollart_core.scheduling.events import LoseTicket, RunStarted, SchedulePolicy
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Trajectory
from rollart_sandboxes.pool.gc import Reaped, collect_garbage, collect_garbage_in_background
from rollart_sandboxes.pool.live import FOLDER_VARIABLE, LiveSandboxes, live_sandboxes
from rollart_testing import FakeEnv, ScriptedEngine

ENV = "support.busy_sandbox:BusySandbox"
OF_THIS_TEST = "ROLLART_TEST_CHAOS"


@pytest.fixture(params=HELD)
def isolation(request) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder for temporary files alone, a ledger and a mark of the test's own."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "boxes"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(OF_THIS_TEST, uuid.uuid4().hex)
    return folder


class NoTrainer:
    """Publishes at once, and counts what it was given."""

    def __init__(self) -> None:
        self.tickets: list[str] = []

    async def train_batch(self, groups, policy_version, *, progress=None):
        for group in groups:
            self.tickets += [t.ticket.ticket_id for t in group.trajectories]
        return []

    async def publish(self, policy_version):
        return Publication(policy_version, 0, 0.0)


class Killer:
    """The recorder of the run, which kills the env worker when so many episodes are done."""

    def __init__(self, logs: Path, kill_at: list[int]) -> None:
        self._logs = logs
        self._kill_at = kill_at
        self.parts: list[WorkerProcess] = []
        self.dispatched_count: collections.Counter[str] = collections.Counter()
        self.done: list[Trajectory] = []
        self.failed: list[Trajectory] = []
        self.lost: list[object] = []

    async def start_worker(self) -> EnvWorkerHandle:
        part = WorkerProcess("env", log_path=self._logs / "env.log")
        limits = {"num_threads": 32, "max_observation_chars": 1000}
        await part.start("rollart_core.runtime.factories:build_env_worker", limits)
        self.parts.append(part)
        return RemoteWorker(part)

    def dispatched(self, ticket, start_version) -> None:
        self.dispatched_count[ticket.ticket_id] += 1

    def ended(self, trajectory: Trajectory) -> None:
        (self.failed if trajectory.failure else self.done).append(trajectory)
        if self._kill_at and len(self.done) >= self._kill_at[0]:
            del self._kill_at[0]
            os.kill(self.parts[-1].pid, signal.SIGKILL)

    def decided(self, action) -> None:
        self.lost.append(action)

    def batch_taken(self, groups, policy_version) -> None: ...

    async def batch_trained(self, record) -> None: ...

    def swapped(self, swaps) -> None: ...


def tokenizer(folder: Path) -> ChatTokenizer:
    spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)
    return load_tokenizer(new_model(str(folder), spec, FakeEnv().corpus(), seed=0))


async def episode_parts(isolation: str, envs: EnvPool, words: ChatTokenizer) -> EpisodeDependencies:
    async def score(request: RewardRequest) -> RewardResult:
        return RewardResult(request.env_return)

    engine = ScriptedEngine(record=False)
    await engine.start()
    sandbox = {"id": isolation, **(IN_DOCKER if isolation == "docker" else {})}
    return EpisodeDependencies(
        env=EnvRef(ENV, {"sandbox": sandbox, "pool": {"warm": 2, "wait_s": 300}}),
        envs=envs,
        engine=engine,
        new_conversation=lambda: Conversation(words, max_context_tokens=2048),
        score=score,
        stop_token_ids=tuple(words.stop_token_ids),
        limits=EpisodeLimits(
            max_turns=TURNS,
            max_new_tokens=16,
            temperature=1.0,
            timeouts=PhaseTimeouts(300, 300),
            generate_s=60,
            episode_s=600,
        ),
        seed=0,
    )


async def episodes(
    isolation: str, killer: Killer, words: ChatTokenizer, num_batches: int
) -> NoTrainer:
    """Run that many batches of five groups of four."""
    envs = EnvPool(killer.start_worker, num_workers=1)
    await envs.start()
    parts = await episode_parts(isolation, envs, words)
    trainer = NoTrainer()
    policy = SchedulePolicy(
        groups_per_batch=5,
        group_size=4,
        max_concurrent=16,
        max_staleness=1,
        num_batches=num_batches,
    )
    controller = Controller(
        ControllerDependencies(
            scheduler=Scheduler(policy, TaskSource(ENV, "train", 64, 0)),
            buffer=Buffer(4, 60),
            run_episode=lambda ticket, version: run_episode(ticket, version, parts),
            trainer=trainer,
            engines=Router([parts.engine]),
            keep_group=lambda group: True,
            recorder=killer,
        ),
        ticket_s=1800,
        wall_s=None,
    )
    try:
        await controller.run(RunStarted())
    finally:
        await envs.close()
        await collect_garbage_in_background(isolation)  # as a run does at its end
    return trainer


def check(isolation: str, scratch: Path, num_batches: int, kill_at: list[int]) -> None:
    killer = Killer(scratch.parent, list(kill_at))
    words = tokenizer(scratch.parent / "model")
    trainer = asyncio.run(episodes(isolation, killer, words, num_batches))
    # What was on both workers that were killed runs in processes of its own from then on.
    assert len(killer.parts) >= 1 + len(kill_at)
    # What was dispatched ended, in a failure with a type or well; no ticket was lost or done twice.
    kinds = ("infrastructure", "collateral")
    killed = [t for t in killer.failed if t.failure.kind.value in kinds]
    assert sum(t.failure.kind.value == "infrastructure" for t in killed) == len(kill_at)
    assert all("the env process is gone" in t.failure.message for t in killed)
    # On a busy machine a box may take too long to start: that is retried, too.
    others = [t.failure for t in killer.failed if t not in killed]
    assert all("did not answer within" in failure.message for failure in others), others
    done = collections.Counter(t.ticket.ticket_id for t in killer.done)
    assert set(done.values()) == {1}
    assert len(trainer.tickets) == len(set(trainer.tickets)) == 20 * num_batches
    assert set(trainer.tickets) <= set(done)
    assert all(t.reward == 1.0 for t in killer.done)
    assert not [action for action in killer.lost if isinstance(action, LoseTicket)]
    retried = [number for number in killer.dispatched_count.values() if number > 1]
    assert len(retried) >= len(kill_at)
    nothing_is_left(isolation, scratch)


def nothing_is_left(isolation: str, scratch: Path) -> None:
    assert list(scratch.iterdir()) == []
    assert asyncio.run(live_sandboxes(LiveSandboxes())) == []
    mark = f"{OF_THIS_TEST}={os.environ[OF_THIS_TEST]}".encode()
    while left := [pid for pid in bearing(mark) if pid != os.getpid()]:
        with contextlib.suppress(OSError):  # a zombie is no process that runs
            states = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1] for pid in left]
            assert all(state.split()[0] in "ZX" for state in states), left
    if isolation == "docker":
        assert asyncio.run(collect_garbage(LiveSandboxes(), sweep=[isolation])) == Reaped()


def bearing(mark: bytes) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_worker_is_killed_twice(isolation, scratch) -> None:
    check(isolation, scratch, 1, [4, 12])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_200_episodes_of_a_run_whose_worker_is_killed_twice(isolation, scratch) -> None:
    check(isolation, scratch, 10, [40, 120])
