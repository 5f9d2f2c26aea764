"""A time limit cancels its block, and only its block."""

from __future__ import annotations

import asyncio
import gc

import pytest
from support.clock import run_virtual

from rollart_core.errors import DeadlineFailure
from rollart_core.rollout import time_limit
from rollart_core.rollout.time_limit import TimeLimit


@pytest.fixture(params=["a timer", "looked through"])
def seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """A limit of 20 ms, of either kind."""
    monkeypatch.setattr(time_limit, "LONG_S", 4.0 if request.param == "a timer" else 0.0)
    monkeypatch.setattr(time_limit, "LOOK_EVERY_S", 0.005)
    return 0.02


def test_a_block_that_takes_longer_is_a_deadline_failure(seconds: float) -> None:
    async def run() -> None:
        async with TimeLimit("env.step", seconds):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineFailure, match=r"env\.step took longer than 0\.02 s") as failed:
        run_virtual(run())
    assert failed.value.boundary == "env.step"


def test_a_block_that_ends_in_time_is_left_alone(seconds: float) -> None:
    async def run() -> int:
        async with TimeLimit("env.step", seconds):
            await asyncio.sleep(0)
        await asyncio.sleep(3 * seconds)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run_virtual(run()) == 0


def test_an_error_inside_passes(seconds: float) -> None:
    async def run() -> None:
        async with TimeLimit("env.step", seconds):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(run())


def test_cancelled_from_outside_stays_cancelled(seconds: float) -> None:
    async def block() -> None:
        async with TimeLimit("env.step", 1000 * seconds):
            await asyncio.Event().wait()

    async def run() -> bool:
        task = asyncio.create_task(block())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_virtual(run())


def test_the_inner_limit_is_the_one_that_is_named(seconds: float) -> None:
    async def run() -> None:
        async with TimeLimit("episode", 100 * seconds), TimeLimit("env.step", seconds):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineFailure, match=r"env\.step"):
        run_virtual(run())


def test_the_outer_limit_ends_the_inner_block(seconds: float) -> None:
    async def run() -> None:
        async with TimeLimit("episode", seconds), TimeLimit("env.step", 100 * seconds):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineFailure, match="episode took longer"):
        run_virtual(run())


def test_many_limits_at_once_each_cancel_their_own_block(seconds: float) -> None:
    async def block(i: int) -> str:
        try:
            async with TimeLimit(f"call {i}", seconds if i % 2 else 1000 * seconds):
                await asyncio.sleep(5 * seconds)
        except DeadlineFailure:
            return "late"
        return "done"

    async def run() -> list[str]:
        return await asyncio.gather(*(block(i) for i in range(20)))

    assert run_virtual(run()) == ["done", "late"] * 10


def test_nothing_is_kept_for_a_loop_that_is_gone() -> None:
    async def run() -> None:
        async with TimeLimit("env.step", 100.0):
            await asyncio.sleep(0)

    before = len(time_limit._watches)
    run_virtual(run())
    gc.collect()
    assert len(time_limit._watches) <= before
