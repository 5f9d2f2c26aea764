"""Many episodes in boxes, whose env workers are killed in between."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cgroups import cgroups_of
from support.sandbox_types import HELD, IN_DOCKER, missing

from rollart_core.errors import CollateralFailure, WorkerLost
from rollart_core.rollout.env_pool import EnvPool, EnvWorkerHandle, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import RemoteWorker
from rollart_core.types import Task, Ticket
from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_sandboxes.pool.gc import Reaped, collect_garbage, collect_garbage_in_background
from rollart_sandboxes.pool.live import FOLDER_VARIABLE, LiveSandboxes, live_sandboxes

ENV = "swe/FunctionRepair-v1"
CONCURRENCY = 16
OPTIONS: dict[str, dict[str, object]] = {"bubblewrap": {}, "docker": dict(IN_DOCKER)}


@pytest.fixture(params=HELD)
def isolation(request: pytest.FixtureRequest) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger of the test's own, and temporary files in a folder of its own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "boxes"))
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


class Episodes:
    """Episodes over env workers that are processes."""

    def __init__(self, isolation: str, num_tickets: int, logs: Path) -> None:
        self._logs = logs
        self._parts: list[WorkerProcess] = []
        sandbox = {"id": isolation, **OPTIONS[isolation]}
        pool = {"warm": 2, "max_sandboxes": 24, "wait_s": 300}
        self.env = EnvRef(ENV, {"sandbox": sandbox, "pool": pool})
        self._book = FunctionRepairEnv(sandbox="bubblewrap")._book
        self._names = self._book.ids("train")
        self.num_tickets = num_tickets
        self._tickets = list(range(num_tickets))
        self.done: list[int] = []
        self.num_retried = 0

    async def run(self, kill_at: list[int]) -> None:
        """Finish every ticket; kill the worker when so many are done."""
        pool = EnvPool(self._start, num_workers=1)
        await pool.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._kill(kill_at))
                for _ in range(CONCURRENCY):
                    group.create_task(self._work(pool))
        finally:
            await pool.close()

    async def _start(self) -> EnvWorkerHandle:
        part = WorkerProcess("env", log_path=self._logs / "env.log")
        limits = {"num_threads": 32, "max_observation_chars": 20_000}
        await part.start("rollart_core.runtime.factories:build_env_worker", limits)
        self._parts.append(part)
        return RemoteWorker(part)

    async def _kill(self, kill_at: list[int]) -> None:
        for number in kill_at:
            while len(self.done) < number:
                await asyncio.sleep(0.01)
            process = self._parts[-1]._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)

    async def _work(self, pool: EnvPool) -> None:
        while self._tickets:
            number = self._tickets.pop()
            try:
                await self._episode(pool, number)
                self.done.append(number)
            except (WorkerLost, CollateralFailure):
                self._tickets.append(number)
                self.num_retried += 1

    async def _episode(self, pool: EnvPool, number: int) -> None:
        index = number % len(self._names)
        ticket = Ticket(f"g.{number}", Task(ENV, "train", index, number), "g", 0)
        gold = self._book.tasks[self._names[index]].gold_code
        timeouts = PhaseTimeouts(reset_s=300, step_s=300)
        async with pool.episode(f"g.{number}.{self.num_retried}", timeouts) as episode:
            await episode.reset(self.env, ticket)
            assert not (await episode.step("no answer")).done
            last = await episode.step(f"```python\n{gold}\n```")
            assert (last.done, last.reward) == (True, 1.0)


def run(isolation: str, scratch: Path, num_tickets: int, kill_at: list[int]) -> Episodes:
    episodes = Episodes(isolation, num_tickets, scratch.parent)

    async def work() -> None:
        await episodes.run(kill_at)
        await collect_garbage_in_background(isolation)  # as a run does at its end

    asyncio.run(work())
    return episodes


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_200_episodes_whose_worker_is_killed_twice(isolation, scratch) -> None:
    all_are_done_and_nothing_is_left(isolation, scratch, 200, [40, 120])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_episodes_whose_worker_is_killed_twice(isolation, scratch) -> None:
    all_are_done_and_nothing_is_left(isolation, scratch, 24, [6, 14])


def all_are_done_and_nothing_is_left(
    isolation: str, scratch: Path, num_tickets: int, kill_at: list[int]
) -> None:
    episodes = run(isolation, scratch, num_tickets, kill_at)
    assert len(episodes._parts) == 1 + len(kill_at)
    assert episodes.num_retried >= len(kill_at)
    nothing_is_left(episodes, isolation, scratch)


def nothing_is_left(episodes: Episodes, isolation: str, scratch: Path) -> None:
    assert sorted(episodes.done) == list(range(episodes.num_tickets))
    assert list(scratch.iterdir()) == []
    assert asyncio.run(live_sandboxes(LiveSandboxes())) == []
    workers = [part._process.pid for part in episodes._parts if part._process]
    assert [cgroup for pid in workers for cgroup in cgroups_of(pid)] == []
    if isolation == "docker":
        assert asyncio.run(collect_garbage(LiveSandboxes(), sweep=[isolation])) == Reaped()
