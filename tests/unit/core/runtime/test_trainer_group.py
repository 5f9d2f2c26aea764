"""The trainer's ranks answer as one and end as one; here they are coroutines of this process."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.pace import scaled

from rollart_core.errors import ConfigError, TrainerLost, WorkerDied
from rollart_core.runtime import remote
from rollart_core.runtime.remote import TrainerGroup

Behaviour = Callable[["RankPart", str], Any]


class RankPart:
    """A part whose calls do what the test says; without that they wait for a dead peer for ever."""

    def __init__(self, rank: int, behave: Behaviour) -> None:
        self.name = f"trainer-{rank}"
        self.rank = rank
        self.on_death: Callable[[Any], None] | None = None
        self.alive = False
        self.calls: list[str] = []
        self._behave = behave
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, factory: str | None = None, kwargs: Any = None) -> None:
        self.alive = True
        self.calls.append(f"start {factory}")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if not self.alive:
            raise WorkerDied(f"the {self.name} process is gone")
        self.calls.append(method)
        if method == "__build__":
            self.ranks = args[1]["ranks"]
        if method in {"__build__", "close"}:
            return None
        if method == remote.OPEN_STORE:
            return "127.0.0.1:1"
        answer = self._behave(self, method)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        await asyncio.shield(self._gone)
        raise AssertionError("never")

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self._gone.set_exception(
                WorkerDied(f"the {self.name} process is gone (signal SIGKILL)")
            )
            if self.on_death is not None:
                self.on_death(self)

    async def close(self, *, grace_s: float = 5.0) -> None:
        self.on_death = None
        self.kill()
        await asyncio.gather(self._gone, return_exceptions=True)


def run(num_ranks: int, behave: Behaviour, check: Callable[[TrainerGroup, list[RankPart]], Any]):
    async def main() -> None:
        parts: list[RankPart] = []

        def new_worker(rank: int) -> RankPart:
            parts.append(RankPart(rank, behave))
            return parts[-1]

        group = TrainerGroup(new_worker, num_ranks, {})
        await group.start()
        try:
            async with asyncio.timeout(scaled(60)):
                await check(group, parts)
        finally:
            await group.close()
        assert not any(p.alive for p in parts)

    asyncio.run(main())


def test_every_rank_is_called_and_the_first_one_answers():
    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        assert await group.call("save") == "save by 0"
        assert [p.calls[-1] for p in parts] == ["save"] * 3
        assert [remote.OPEN_STORE in p.calls for p in parts] == [True, False, False]

    run(3, lambda part, method: f"{method} by {part.rank}", check)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_death_is_told_of_where_nobody_asks_for_anything(num_ranks: int):
    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        lost: asyncio.Queue[Exception] = asyncio.Queue()
        group.on_lost = lost.put_nowait
        parts[-1].kill()
        assert str(await lost.get()) == f"the trainer-{num_ranks - 1} process is gone"
        await group.restart()
        with pytest.raises(TrainerLost):
            await group.call("fails on one")
        for _ in range(10):
            await asyncio.sleep(0)
        assert lost.empty()  # what a call has raised is not told once more

    def behave(part: RankPart, method: str) -> object:
        return ValueError("no") if part.rank == 0 else WorkerDied("it is gone")

    run(num_ranks, behave if num_ranks > 1 else lambda *_: WorkerDied("it is gone"), check)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_dies_ends_the_group_and_a_restart_brings_a_fresh_one(num_ranks: int):
    healthy: list[bool] = []

    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        waiting = asyncio.create_task(group.train_batch([], 0))
        while parts[-1].calls[-1] != "train_batch":
            await asyncio.sleep(0)
        parts[-1].kill()
        with pytest.raises(TrainerLost, match=f"trainer-{num_ranks - 1} process is gone .signal"):
            await waiting
        assert not any(p.alive for p in parts)
        with pytest.raises(TrainerLost):
            await group.publish(1)
        healthy.append(True)
        await group.restart()
        assert await group.call("load", "folder") == "whole"
        assert len(parts) == 2 * num_ranks

    run(num_ranks, lambda part, method: "whole" if healthy else None, check)


def test_what_all_ranks_raise_is_raised_and_the_group_goes_on():
    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            await group.train_batch([], 0)
        assert await group.call("save") == "saved"

    def behave(part: RankPart, method: str) -> Any:
        return "saved" if method == "save" else ValueError("advantages do not fit")

    run(2, behave, check)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("no space left"), TrainerLost), (ConfigError("no checkpoint"), ConfigError)],
)
def test_what_one_rank_raises_ends_those_that_wait_for_it(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "ANSWER_GRACE_S", 0.01)

    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        with pytest.raises(raised, match=str(error)):
            await group.call("save")
        assert not any(p.alive for p in parts)
        with pytest.raises(TrainerLost, match=str(error)):
            await group.call("save")

    run(2, lambda part, method: error if part.rank == 1 else None, check)


def test_ranks_that_cannot_reach_each_other_are_lost_though_all_raise_alike():
    async def check(group: TrainerGroup, parts: list[RankPart]) -> None:
        with pytest.raises(TrainerLost, match="Connection reset"):
            await group.call("save")
        assert not any(p.alive for p in parts)

    run(2, lambda part, method: RuntimeError("[gloo/pair.cc:1] Connection reset"), check)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_rank_is_handed_over_once_it_is_built(num_ranks: int):
    async def main() -> None:
        watched: list[tuple[str, str]] = []
        group = TrainerGroup(
            lambda rank: RankPart(rank, lambda part, method: None),
            num_ranks,
            {},
            watch=lambda part: watched.append((part.name, part.calls[-1])),
        )
        await group.start()
        await group.restart()
        built = f"start {remote.BUILD_TRAINER}" if num_ranks == 1 else "__build__"
        assert watched == [(f"trainer-{r}", built) for r in range(num_ranks)] * 2
        await group.close()

    asyncio.run(main())


def test_each_rank_hears_whether_its_devices_are_its_own() -> None:
    async def main() -> list[bool]:
        parts: list[RankPart] = []

        def new_worker(rank: int) -> RankPart:
            parts.append(RankPart(rank, lambda part, method: None))
            return parts[-1]

        group = TrainerGroup(new_worker, 2, {}, own_devices=True)
        await group.start()
        await group.close()
        return [part.ranks.own_devices for part in parts]

    assert asyncio.run(main()) == [True, True]
