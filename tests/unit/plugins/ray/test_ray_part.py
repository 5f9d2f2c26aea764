"""Calls on a part in a Ray actor: they travel together, and each has its own end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from rollart_core.errors import WorkerDied
from rollart_ray.worker import ActorSettings, RayWorker, Reservation, WorkerActor


class _Method:
    def __init__(self, handle: _Handle, method: Any) -> None:
        self._handle, self._method = handle, method

    def remote(self, *args: Any) -> Any:
        if self._handle.is_gone:
            raise RuntimeError("Ray was shut down")
        self._handle.sent.append((self._method.__name__, *args))
        return self._method(*args)


class _Handle:
    """An actor in this process, called as Ray's are."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_gone = False
        self._actor = WorkerActor(ActorSettings())

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, getattr(self._actor, name))


class _Cluster:
    patience_s = 60.0

    def __init__(self) -> None:
        self.handle = _Handle()
        self.died = asyncio.Event()

    def new_actor(self, *_: Any) -> _Handle:
        return self.handle

    def kill(self, _: Any) -> None:
        self.died.set()

    async def answer(self, ref: Any) -> Any:
        answer, died = asyncio.ensure_future(ref), asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait([answer, died], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WorkerDied("its node is gone")
            return answer.result()
        finally:
            answer.cancel()
            died.cancel()


class Unreadable:
    """What cannot be read where it arrives."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not to be read here")


class Echo:
    """A part."""

    async def say(self, text: object) -> object:
        return text

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def refuse(self) -> None:
        raise ValueError("no")

    async def unreadable(self) -> object:
        return Unreadable()

    async def unsendable(self) -> object:
        return lambda: None


async def _started() -> tuple[RayWorker, _Cluster]:
    cluster: Any = _Cluster()

    async def reserved() -> Reservation:
        return Reservation(None, None, 0)  # type: ignore[arg-type]

    part = RayWorker("engine 0", cluster, reserved, ActorSettings())
    await part.start(f"{__name__}:Echo")
    assert part.pid == os.getpid()
    cluster.handle.sent.clear()
    return part, cluster


def taken(cluster: _Cluster) -> list[int]:
    return [len(what[1]) for what in cluster.handle.sent if what[0] == "take"]


def test_calls_made_at_once_travel_together_and_so_do_answers():
    async def main() -> None:
        part, cluster = await _started()
        assert await asyncio.gather(*(part.call("say", i) for i in range(9))) == list(range(9))
        assert taken(cluster) == [9]
        assert sum(what[0] == "answers" for what in cluster.handle.sent) < 9
        assert await part.call("say", "later") == "later"
        assert taken(cluster) == [9, 1]
        await part.close()

    asyncio.run(main())


def test_what_is_wrong_with_one_call_is_no_matter_of_the_others():
    async def main() -> None:
        part, _ = await _started()
        calls = [
            part.call("say", 1),
            part.call("say", Unreadable()),
            part.call("refuse"),
            part.call("unsendable"),
            part.call("unreadable"),
            part.call("say", 2),
        ]
        one, unreadable, refused, unsendable, answer, two = await asyncio.gather(
            *calls, return_exceptions=True
        )
        assert (one, two) == (1, 2)
        assert "not to be read here" in str(unreadable)
        assert isinstance(refused, ValueError)
        assert "unsendable answer" in str(unsendable)
        assert "unreadable answer: not to be read here" in str(answer)
        assert part.alive
        await part.close()

    asyncio.run(main())


def test_a_caller_that_gives_up_leaves_the_others_their_answers():
    async def main() -> None:
        part, _ = await _started()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await part.call("wait")
        assert await part.call("say", "still here") == "still here"
        await part.close()

    asyncio.run(main())


def test_all_callers_hear_when_ray_is_gone_from_this_process():
    async def main() -> None:
        part, cluster = await _started()
        waiting = asyncio.ensure_future(part.call("wait"))
        await asyncio.sleep(0)
        cluster.handle.is_gone = True
        for call in (part.call("say", 1), waiting):
            with pytest.raises(WorkerDied, match="Ray was shut down"):
                await call
        await part.close()

    asyncio.run(main())


def test_all_callers_hear_of_the_end():
    async def main() -> None:
        part, cluster = await _started()
        dead: list[object] = []
        part.on_death = dead.append
        calls = [asyncio.ensure_future(part.call("wait")) for _ in range(3)]
        await asyncio.sleep(0)
        cluster.died.set()
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, WorkerDied)
            assert "its node is gone" in str(answer)
        assert dead == [part]
        with pytest.raises(WorkerDied, match="its node is gone"):
            await part.call("say", 1)
        await part.close()

    asyncio.run(main())
