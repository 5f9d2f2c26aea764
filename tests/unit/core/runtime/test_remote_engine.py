"""Engines that die and come back, over parts that are no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.pace import until

from rollart_core.contracts.inference import GenerateRequest, WeightSwap
from rollart_core.errors import EngineDied, WorkerDied
from rollart_core.runtime.remote import (
    START_LIMIT_S,
    RemoteEngine,
    RestartPolicy,
    Restarts,
)


class FakePart:
    """A part whose calls the test answers."""

    def __init__(self, name: str, answers: dict[str, Callable[..., Any]]) -> None:
        self.name = name
        self.on_death: Callable[[Any], None] | None = None
        self.alive = False
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers
        self._dead = asyncio.Event()

    async def start(self, factory: str | None = None, kwargs: Any = None) -> None:
        self.alive = True

    async def call(self, method: str, *args: Any) -> Any:
        if not self.alive:
            raise WorkerDied(f"the {self.name} process is gone")
        self.calls.append((method, *args))
        answer = self._answers.get(method)
        if answer is not None:
            return await answer(*args)
        if method == "load_weights":
            return WeightSwap(args[0], 0.0, 0)
        if method == "generate":
            await self._dead.wait()
            raise WorkerDied(f"the {self.name} process is gone")
        return None

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self._dead.set()
            if self.on_death is not None:
                self.on_death(self)

    async def close(self, *, grace_s: float = 5.0) -> None:
        self.on_death = None
        self.kill()


class Probe:
    """An engine, its parts in the order they were made, and what it told."""

    def __init__(
        self,
        most: int = 3,
        window_s: float = 600.0,
        limit_s: float = START_LIMIT_S,
        **answers: Callable[..., Any],
    ) -> None:
        self.parts: list[FakePart] = []
        self.events: list[tuple[str, Mapping[str, object]]] = []
        self.health: list[str] = []
        self._answers = answers
        care = RestartPolicy(
            None, Restarts(most, window_s), lambda *event: self.events.append(event), limit_s
        )
        self.engine = RemoteEngine(self._new, {}, care=care)
        self.engine.on_health = lambda engine: self.health.append(engine.health)

    def _new(self) -> FakePart:
        self.parts.append(FakePart("engine", self._answers))
        return self.parts[-1]

    async def until(self, health: str) -> None:
        await until(lambda: self.engine.health == health, health)


REQUEST = GenerateRequest("r", [1], 1, "s")


def test_an_engine_is_up_again_only_with_the_newest_weights():
    async def main() -> None:
        probe = Probe()
        await probe.engine.start()
        await probe.engine.load_weights(4)
        waiting = asyncio.create_task(probe.engine.generate(REQUEST))
        await asyncio.sleep(0)
        probe.parts[0].kill()
        with pytest.raises(EngineDied):
            await waiting
        assert probe.engine.health == "down"
        with pytest.raises(EngineDied):
            await probe.engine.load_weights(5)  # published while it is down
        await probe.until("up")
        assert probe.parts[1].calls == [("start",), ("load_weights", 5)]
        assert probe.health == ["up", "down", "up"]
        assert [kind for kind, _ in probe.events] == ["part_died", "part_back"]
        assert probe.events[1][1]["policy_version"] == 5
        await probe.engine.close()

    asyncio.run(main())


def test_nothing_is_asked_of_an_engine_that_is_being_started():
    async def main() -> None:
        begins, loaded = asyncio.Event(), asyncio.Event()

        async def start() -> None:
            if len(probe.parts) > 1:
                begins.set()
                await loaded.wait()

        probe = Probe(start=start)
        await probe.engine.start()
        probe.parts[0].kill()
        await begins.wait()
        with pytest.raises(EngineDied):
            await probe.engine.load_weights(3)
        with pytest.raises(EngineDied):
            await probe.engine.generate(REQUEST)
        await probe.engine.release("s")
        loaded.set()
        await probe.until("up")
        assert probe.parts[1].calls == [("start",), ("load_weights", 3)]
        await probe.engine.close()

    asyncio.run(main())


def test_a_version_that_is_overtaken_while_the_engine_loads_it_is_let_go():
    async def main() -> None:
        async def load(version: int) -> WeightSwap:
            if version == 1 and len(probe.parts) == 2:
                with pytest.raises(EngineDied):
                    probe.parts[1].alive = False
                    await probe.engine.load_weights(2)
                probe.parts[1].alive = True
                raise LookupError("version 1 is gone")
            return WeightSwap(version, 0.0, 0)

        probe = Probe(load_weights=load)
        await probe.engine.start()
        await probe.engine.load_weights(1)
        probe.parts[0].kill()
        await probe.until("up")
        assert [c for c in probe.parts[1].calls if c[0] == "load_weights"][-1] == (
            "load_weights",
            2,
        )
        await probe.engine.close()

    asyncio.run(main())


def test_an_engine_that_keeps_dying_is_lost_and_says_why():
    async def main() -> None:
        probe = Probe(most=1)
        await probe.engine.start()
        probe.engine.kill("it did not load weights within 1 s")
        await probe.until("up")
        probe.parts[1].kill()
        await probe.until("lost")
        assert "died 2 times" in probe.engine.why_lost
        kinds = [kind for kind, _ in probe.events]
        assert kinds == ["part_died", "part_back", "part_died", "part_lost"]
        assert "did not load weights" in str(probe.events[0][1]["why"])
        await probe.engine.close()

    asyncio.run(main())


def test_a_start_that_fails_counts_as_a_death():
    async def main() -> None:
        async def start() -> None:
            if len(probe.parts) > 1:
                raise OSError("no device")

        probe = Probe(most=1, start=start)
        await probe.engine.start()
        probe.parts[0].kill()
        await probe.until("lost")
        assert "its start failed: no device" in probe.engine.why_lost
        assert len(probe.parts) == 2
        await probe.engine.close()

    asyncio.run(main())


def test_starts_that_last_longer_than_the_window_of_restarts_still_count():
    """Each fails at its limit, which is above the window: without that it would start for ever."""

    async def main() -> None:
        async def start() -> None:
            if len(probe.parts) > 1:
                await asyncio.Event().wait()

        probe = Probe(most=1, window_s=0.05, limit_s=0.1, start=start)
        await probe.engine.start()
        probe.parts[0].kill()
        await probe.until("lost")
        assert len(probe.parts) == 2
        assert "its start failed: not up after 0.1 s" in probe.engine.why_lost
        await probe.engine.close()

    asyncio.run(main())


def test_a_closed_engine_does_not_come_back():
    async def main() -> None:
        probe = Probe()
        await probe.engine.start()
        await probe.engine.close()
        assert len(probe.parts) == 1
        assert not probe.parts[0].alive

    asyncio.run(main())


@pytest.mark.parametrize("call", ["generate", "load_weights", "stats"])
def test_an_engine_that_says_that_its_server_is_gone_is_started_again(call):
    async def main() -> None:
        said = iter([EngineDied("the server ended (signal SIGKILL)")])

        async def answer(*args: Any) -> Any:
            error = next(said, None)
            if error is not None:
                raise error
            return WeightSwap(4, 0.0, 0)

        probe = Probe(**{call: answer})
        await probe.engine.start()
        arguments = {"generate": (REQUEST,), "load_weights": (4,), "stats": ()}[call]
        with pytest.raises(EngineDied, match="SIGKILL"):
            await getattr(probe.engine, call)(*arguments)
        await probe.until("up")
        assert len(probe.parts) == 2
        (kind, died), _ = probe.events
        assert kind == "part_died"
        assert "the server ended (signal SIGKILL)" in str(died["why"])

    asyncio.run(main())


@pytest.mark.parametrize("error", [WorkerDied("gone"), ValueError("no such request")])
def test_a_cancelled_request_stays_cancelled_whatever_its_abort_raises(error):
    async def main() -> None:
        async def abort(request_ids: list[str]) -> None:
            raise error

        probe = Probe(abort=abort)
        await probe.engine.start()
        waiting = asyncio.create_task(probe.engine.generate(REQUEST))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert probe.parts[0].calls[-1] == ("abort", ["r"])
        await probe.engine.close()

    asyncio.run(main())
