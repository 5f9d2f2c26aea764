"""Episodes that are aborted, or whose deadlines pass: what they leave in their worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import pytest
from support.clock import pass_s
from support.pace import scaled

from rollart_core.contracts.agent import AgentResult, AgentStart
from rollart_core.errors import CancelledFailure, DeadlineFailure
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.types import Task, Ticket

LIMIT_S = scaled(60)
TICKET = Ticket("g0.0", Task("env", "train", 0, 0), "g0", 0)
LONG = PhaseTimeouts(reset_s=60, step_s=60)


class Gate:
    """Where environments of these tests stop, until the test lets them go on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = threading.Event()
        self.counts = {"made": 0, "closed": 0, "waits": 0}

    def count(self, what: str) -> None:
        with self._changed:
            self.counts[what] += 1
            self._changed.notify_all()

    def wait(self) -> None:
        self.count("waits")
        self._open.wait()

    def open(self) -> None:
        self._open.set()

    async def until(self, what: str, count: int) -> bool:
        def counted() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self.counts[what] >= count, LIMIT_S)

        return await asyncio.to_thread(counted)


class Gated(gymnasium.Env[str, str]):
    """Stops at the gate where its option says."""

    gate: ClassVar[Gate]

    def __init__(self, *, at: str = "") -> None:
        self._at = at
        self._meet("make")
        self.gate.count("made")

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self._meet("reset")
        return "ok", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._meet("step")
        return "ok", 0.0, True, False, {}

    def close(self) -> None:
        self.gate.count("closed")

    def _meet(self, where: str) -> None:
        if self._at == where:
            self.gate.wait()


class GatedAgent(Gated):
    """An agent task that stops there."""

    async def prepare(self, *, seed: int, options: Any) -> AgentStart:
        if self._at == "prepare":
            self.gate.count("waits")
            await asyncio.Event().wait()
        return AgentStart("go")

    async def run(self, endpoint: Any) -> None:
        pass

    async def finish(self, recorded: Any) -> AgentResult:
        return AgentResult(0.0)


class Afar(LocalWorker):
    """A worker as if in a process of its own: who stops to wait for a call does not end it."""

    def __init__(self, part: EnvWorker) -> None:
        super().__init__(part)
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = asyncio.create_task(super().call(method, *args, **kwargs))
        self._calls.add(call)
        call.add_done_callback(self._answered)
        return await asyncio.shield(call)

    def _answered(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        call.exception()  # nobody may wait for it


@pytest.fixture
def gate() -> Iterator[Gate]:
    Gated.gate = Gate()
    yield Gated.gate
    Gated.gate.open()  # no thread outlives its test


def env(at: str = "", kind: type = Gated) -> EnvRef:
    return EnvRef(f"{__name__}:{kind.__name__}", {"at": at})


async def started(num_threads: int = 64) -> EnvPool:
    async def start() -> Afar:
        return Afar(EnvWorker(num_threads=num_threads))

    pool = EnvPool(start, num_workers=1)
    await pool.start()
    return pool


async def play(pool: EnvPool, name: str, env: EnvRef) -> None:
    async with pool.episode(name, LONG) as episode:
        if "Agent" in env.id:
            await episode.prepare(env, TICKET)
            return
        await episode.reset(env, TICKET)
        await episode.step("act")


async def aborted(*episodes: asyncio.Task[None]) -> None:
    for episode in episodes:
        episode.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError)
        for end in await asyncio.gather(*episodes, return_exceptions=True)
    )


async def reset(worker: EnvWorker, env: EnvRef, name: str = "e", timeout_s: float = 60.0) -> None:
    await worker.reset(name, env, seed=0, options={}, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("at", "kind"),
    [
        ("make", Gated),
        ("reset", Gated),
        ("step", Gated),
        ("make", GatedAgent),
        ("prepare", GatedAgent),
    ],
)
def test_an_aborted_episode_leaves_no_environment_behind(at, kind, gate):
    async def main() -> None:
        pool = await started()
        playing = [asyncio.create_task(play(pool, f"e{n}", env(at, kind))) for n in range(3)]
        assert await gate.until("waits", 3)
        await aborted(*playing)
        gate.open()
        assert await gate.until("closed", 3)  # while its worker goes on
        await pool.close()
        assert (gate.counts["made"], gate.counts["closed"]) == (3, 3)

    asyncio.run(main())


def test_an_environment_whose_making_outlasts_its_deadline_is_closed(gate):
    async def main() -> None:
        worker = EnvWorker()
        call = asyncio.create_task(reset(worker, env("make"), timeout_s=60))
        assert await gate.until("waits", 1)
        pass_s(60)
        with pytest.raises(DeadlineFailure):
            await call
        assert await worker.num_hung() == 1
        gate.open()
        await worker.shutdown()
        assert (gate.counts["made"], gate.counts["closed"]) == (1, 1)

    asyncio.run(main())


def test_episodes_go_on_while_aborted_ones_block_all_threads(gate):
    async def main() -> None:
        pool = await started(num_threads=2)
        blocked = [asyncio.create_task(play(pool, f"b{n}", env("step"))) for n in range(2)]
        assert await gate.until("waits", 2)
        await aborted(*blocked)
        await asyncio.gather(*(play(pool, f"e{n}", env()) for n in range(2)))
        assert await gate.until("closed", 2)
        gate.open()
        await pool.close()
        assert (gate.counts["made"], gate.counts["closed"]) == (4, 4)

    asyncio.run(main())


def test_closing_waits_for_no_thread_and_happens_though_nobody_waits_for_it(gate):
    async def main() -> None:
        worker = EnvWorker(num_threads=1)
        await reset(worker, env("step"), "busy")
        await reset(worker, env(), "e")
        busy = asyncio.create_task(worker.step("busy", "act", timeout_s=60))
        assert await gate.until("waits", 1)
        await worker.end("e", reusable=False, timeout_s=0.0)
        assert await gate.until("closed", 1)
        gate.open()
        await busy
        await worker.shutdown()

    asyncio.run(main())


def test_a_call_whose_episode_ends_fails_as_cancelled(gate):
    async def main() -> None:
        worker = EnvWorker()
        call = asyncio.create_task(reset(worker, env("reset")))
        assert await gate.until("waits", 1)
        await worker.end("e", reusable=True)
        with pytest.raises(CancelledFailure, match="the episode has ended"):
            await call
        assert gate.counts["closed"] == 1  # though it was to be used again: it is busy
        await worker.shutdown()

    asyncio.run(main())


def test_an_end_that_comes_before_the_beginning_holds(gate):
    async def main() -> None:
        worker = EnvWorker()
        await worker.end("e", reusable=False)
        with pytest.raises(CancelledFailure, match="the episode has ended"):
            await reset(worker, env())
        assert gate.counts["made"] == 0
        await reset(worker, env())
        await worker.shutdown()

    asyncio.run(main())


class Stubborn(EnvWorker):
    """Makes environments though it is told to stop."""

    async def _made(self, env: EnvRef) -> Any:
        making = asyncio.create_task(super()._made(env))
        while not making.done():
            try:
                await asyncio.shield(making)
            except asyncio.CancelledError:
                continue
        return making.result()


def test_an_environment_that_comes_after_the_end_of_its_episode_is_closed(gate):
    async def main() -> None:
        worker = Stubborn()
        call = asyncio.create_task(reset(worker, env("make")))
        assert await gate.until("waits", 1)
        await worker.end("e", reusable=False, timeout_s=0.01)
        gate.open()
        with pytest.raises(CancelledFailure, match="the episode has ended"):
            await call
        assert (gate.counts["made"], gate.counts["closed"]) == (1, 1)
        await worker.shutdown()

    asyncio.run(main())
