"""Which engine leaves when there are to be fewer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollart_core.runtime.engine_set import EngineSet
from rollart_core.testing import ScriptedEngine


class Rooms:
    async def make_room(self, role: str, index: int, pool: str | None) -> None:
        raise AssertionError("none is to join")

    async def free_room(self, role: str, index: int) -> None:
        pass


def left(pools: Sequence[str], count: int) -> list[str]:
    """Return the pools of the engines that stay."""

    def new_engine(index: int) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.pool = pools[index]
        return engine

    async def scale() -> list[str]:
        engines = EngineSet(new_engine, Rooms(), load_limit_s=1.0)
        await engines.start(len(pools))
        try:
            await engines.resize(count)
            return sorted(engines.counts.elements())
        finally:
            await engines.close()

    return asyncio.run(scale())


def test_a_class_keeps_its_last_engine_while_another_has_several() -> None:
    assert left(["base", "base", "base", "served"], 2) == ["base", "served"]
    assert left(["base", "served", "served"], 2) == ["base", "served"]


def test_of_one_class_and_of_last_ones_the_newest_leaves() -> None:
    assert left(["base", "base", "base"], 1) == ["base"]
    assert left(["base", "served"], 1) == ["base"]
