"""Which engine leaves when there are to be fewer, and that it is closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from support.clock import run_virtual

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.runtime.workers import EngineSet
from rollart_testing import ScriptedEngine


class Reservations:
    def __init__(self) -> None:
        self.freed: list[int] = []

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        raise AssertionError("none is to join")

    async def release_reservation(self, role: str, index: int) -> None:
        self.freed.append(index)


def left(pools: Sequence[str], count: int) -> list[str]:
    """Return the pools of the engines that stay."""

    def new_engine(index: int) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.pool = pools[index]
        return engine

    async def scale() -> list[str]:
        engines = EngineSet(new_engine, Reservations(), load_limit_s=60.0)
        await engines.start(len(pools))
        try:
            await engines.resize(count)
            return sorted(engines.counts.elements())
        finally:
            await engines.close()

    return run_virtual(scale())


def test_a_class_keeps_its_last_engine_while_another_has_several() -> None:
    assert left(["base", "base", "base", "served"], 2) == ["base", "served"]
    assert left(["base", "served", "served"], 2) == ["base", "served"]


def test_of_one_class_and_of_last_ones_the_newest_leaves() -> None:
    assert left(["base", "base", "base"], 1) == ["base"]
    assert left(["base", "served"], 1) == ["base"]


def test_an_engine_that_still_answers_is_closed_when_the_run_ends_meanwhile() -> None:
    made: list[ScriptedEngine] = []
    reservations = Reservations()

    def new_engine(index: int) -> ScriptedEngine:
        made.append(ScriptedEngine(latency_s=60.0))
        return made[-1]

    async def scale() -> None:
        engines = EngineSet(new_engine, reservations, load_limit_s=60.0)
        await engines.start(2)
        requests = [GenerateRequest(str(i), [1], 4, session_id=str(i)) for i in range(2)]
        answers = [asyncio.ensure_future(engines.router.generate(r)) for r in requests]
        while sum(state.num_running for state in engines.router.engine_states) < 2:
            await asyncio.sleep(0)
        scaling = asyncio.ensure_future(engines.resize(1))
        while len(engines.router.engine_states) == 2:
            await asyncio.sleep(0)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        assert scaling.cancelled()
        await engines.close()
        await asyncio.gather(*answers, return_exceptions=True)

    run_virtual(scale())
    assert all(engine.num_calls["close"] for engine in made)
    assert reservations.freed == [1]


def test_an_engine_whose_end_is_cut_off_is_ended_with_the_others() -> None:
    begun = asyncio.Event()

    class Slow(ScriptedEngine):
        async def close(self) -> None:
            first = not begun.is_set()
            begun.set()
            await asyncio.sleep(60.0 if first else 0.0)
            await super().close()

    made: list[Slow] = []

    def new_engine(index: int) -> ScriptedEngine:
        made.append(Slow())
        return made[-1]

    async def scale() -> None:
        engines = EngineSet(new_engine, Reservations(), load_limit_s=60.0)
        await engines.start(2)
        scaling = asyncio.ensure_future(engines.resize(1))
        await begun.wait()
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        await engines.close()

    run_virtual(scale())
    assert [engine.num_calls["close"] for engine in made] == [1, 1]
