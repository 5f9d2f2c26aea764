import asyncio
from contextlib import AsyncExitStack

import pytest

from rollart_core.errors import CollateralFailure, EnvironmentFailure, WorkerDied, WorkerLost
from rollart_core.rollout.env_answers import Observed
from rollart_core.rollout.env_pool import EnvPool, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import Task, Ticket

TIMEOUTS = PhaseTimeouts(60, 60)
REF = EnvRef("any")


def ticket(index: int, env_id: str = "good") -> Ticket:
    return Ticket(f"g{index}.0", Task(env_id, "train", index, 0), f"g{index}", 0)


class FakeWorker:
    """A process in which a step waits until it is told to go on, or the process is lost."""

    def __init__(self) -> None:
        self.alive = True
        self.episodes: set[str] = set()
        self._end = asyncio.Event()
        self._lost = False

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        if not self.alive:
            raise WorkerDied("the env process is gone")
        if method == "reset":
            self.episodes.add(str(args[0]))
            return Observed("ok")
        if method == "step":
            await self._end.wait()
            if self._lost:
                raise WorkerDied("the env process is gone")
            self._end.clear()
            return Observed("ok")
        if method == "end":
            self.episodes.discard(str(args[0]))
        return 0

    def let_go(self, *, lost: bool = False) -> None:
        self._lost = lost
        self.alive = not lost
        if lost:
            self.episodes.clear()
        self._end.set()

    async def close(self) -> None:
        self.alive = False


class Probe:
    """A pool of one worker whose processes are at hand."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.pool = EnvPool(self.start, num_workers=1)

    async def start(self) -> FakeWorker:
        self.workers.append(FakeWorker())
        return self.workers[-1]

    async def lose(self, stepping: list[Ticket], waiting: list[Ticket] = []) -> list[Exception]:  # noqa: B006
        """Lose the process of some episodes; return how each fails."""
        async with AsyncExitStack() as stack:
            episodes = []
            for one in (*stepping, *waiting):
                entered = self.pool.episode(one.ticket_id, TIMEOUTS, one.task)
                episodes.append(await stack.enter_async_context(entered))
                await episodes[-1].reset(REF, one)
            calls = [asyncio.create_task(e.step("a")) for e in episodes[: len(stepping)]]
            await asyncio.sleep(0)
            self.workers[-1].let_go(lost=True)
            found = await asyncio.gather(*calls, return_exceptions=True)
            for episode in episodes[len(stepping) :]:
                with pytest.raises((WorkerLost, CollateralFailure)) as caught:
                    await episode.step("a")
                found.append(caught.value)
        return found

    def names(self) -> set[str]:
        """Return the ids of all episodes that are on a process."""
        return set().union(*(worker.episodes for worker in self.workers))

    async def play(self, one: Ticket, *, lost: bool = False) -> None:
        """Play one episode, to its end or to that of its process."""
        async with self.pool.episode(one.ticket_id, TIMEOUTS, one.task) as episode:
            await episode.reset(REF, one)
            (worker,) = [
                w for w in self.workers if any(n.startswith(one.ticket_id) for n in w.episodes)
            ]
            worker.let_go(lost=lost)
            await episode.step("a")


def test_a_loss_is_counted_once_and_its_other_episodes_are_collateral():
    async def main() -> None:
        probe = Probe()
        await probe.pool.start()
        found = await probe.lose([ticket(i) for i in range(3)], [ticket(9)])
        assert [type(e) for e in found] == [WorkerLost, *[CollateralFailure] * 3]
        assert [e.failure().kind for e in found] == ["infrastructure", *["collateral"] * 3]
        assert all(e.retryable for e in found)
        assert probe.pool.num_replaced == 1
        await probe.pool.close()

    asyncio.run(main())


def test_who_alone_was_in_a_call_gets_a_process_of_its_own_and_is_blamed_if_that_ends_too():
    async def main() -> None:
        probe = Probe()
        await probe.pool.start()
        await probe.lose([ticket(0)], [ticket(1)])
        await probe.play(ticket(1))
        shared = probe.workers[-1]
        with pytest.raises(EnvironmentFailure, match="no other environment was in its process"):
            await probe.play(ticket(0), lost=True)
        assert probe.workers[-1] is not shared
        assert shared.alive
        assert probe.pool.num_replaced == 1
        await probe.pool.close()

    asyncio.run(main())


def test_of_several_in_a_call_those_in_two_losses_are_suspected_until_they_end_well():
    async def main() -> None:
        probe = Probe()
        await probe.pool.start()
        await probe.lose([ticket(0), ticket(1)])
        await probe.lose([ticket(0), ticket(2)])
        await probe.play(ticket(1))
        num = len(probe.workers)
        await probe.play(ticket(2))
        assert len(probe.workers) == num
        await probe.play(ticket(0))
        assert len(probe.workers) == num + 1
        await probe.play(ticket(0))
        assert len(probe.workers) == num + 1
        await probe.pool.close()
        assert not any(worker.alive for worker in probe.workers)

    asyncio.run(main())


def test_an_environment_that_ends_its_processes_again_and_again_is_kept_apart_from_others():
    async def main() -> None:
        probe = Probe()
        await probe.pool.start()
        await probe.play(ticket(0))
        shared = probe.workers[0]
        for index in range(2):
            bad = ticket(index, "bad")
            await probe.lose([bad], [ticket(5)])
            with pytest.raises(EnvironmentFailure):
                await probe.play(bad, lost=True)
        await probe.play(ticket(0))
        shared = probe.workers[-1]
        found = await probe.lose([ticket(7, "bad")])
        assert [type(e) for e in found] == [WorkerLost]
        assert shared.alive
        await probe.pool.close()
        assert not any(worker.alive for worker in probe.workers)

    asyncio.run(main())


def test_an_episode_ends_before_its_own_process_is_up():
    async def main() -> None:
        probe = Probe()
        await probe.pool.start()
        await probe.lose([ticket(0)])
        gate = asyncio.Event()

        async def start() -> FakeWorker:
            await gate.wait()
            return FakeWorker()

        probe.pool._start_worker = start
        playing = asyncio.create_task(probe.play(ticket(0)))
        await asyncio.sleep(0)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()
        gate.set()
        await probe.pool.close()

    asyncio.run(main())
