"""Calls on daemon threads that are given up: before their turn, meanwhile, and when they end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from support.clock import pass_s
from support.pace import scaled

from rollart_core.rollout.threads import DaemonThreads

LIMIT_S = scaled(60)


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def heard(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, LIMIT_S)


def test_a_call_that_waits_for_its_turn_gets_the_thread_of_one_that_is_given_up():
    async def main() -> None:
        threads, begun, go = DaemonThreads(1), threading.Event(), threading.Event()
        hangs = asyncio.create_task(threads.run(lambda: begun.set() or go.wait()))
        assert await heard(begun)
        waits = asyncio.create_task(threads.run(lambda: "made"))
        await asyncio.sleep(0)
        await cancelled(hangs)
        async with asyncio.timeout(LIMIT_S):
            assert await waits == "made"
        assert threads.num_hung == 1
        go.set()
        threads.close()

    asyncio.run(main())


def test_a_score_that_waits_for_its_turn_gets_the_thread_of_one_that_hangs():
    async def main() -> None:
        threads, begun, go = DaemonThreads(1), threading.Event(), threading.Event()
        hangs = asyncio.create_task(threads.run_all([lambda: begun.set() or go.wait()], 60.0))
        assert await heard(begun)
        waits = asyncio.create_task(threads.run_all([lambda: "made"], 3600.0))
        await asyncio.sleep(0)
        pass_s(60)
        assert await hangs == [None]
        assert await waits == ["made"]
        assert threads.num_hung == 1
        go.set()
        threads.close()

    asyncio.run(main())


def test_a_call_that_is_given_up_before_its_turn_is_not_made():
    async def main() -> None:
        threads, begun, go = DaemonThreads(1), threading.Event(), threading.Event()
        made: list[int] = []
        busy = asyncio.create_task(threads.run(lambda: begun.set() or go.wait()))
        assert await heard(begun)
        waits = asyncio.create_task(threads.run(lambda: made.append(1)))
        await asyncio.sleep(0)
        await cancelled(waits)
        go.set()
        await busy
        await threads.run(lambda: made.append(2))
        assert made == [2]
        threads.close()

    asyncio.run(main())


def test_without_a_bound_no_call_waits_and_each_is_made():
    async def main() -> None:
        threads, made, go = DaemonThreads(None), threading.Event(), threading.Event()
        together = threading.Barrier(3)
        busy = [asyncio.create_task(threads.run(together.wait)) for _ in range(2)]
        given_up = asyncio.create_task(threads.run(lambda: go.wait() and made.set()))
        await asyncio.sleep(0)
        await cancelled(given_up)  # whether its thread has begun it or not
        go.set()
        assert await heard(made)
        await asyncio.to_thread(together.wait, LIMIT_S)
        await asyncio.gather(*busy)
        threads.close()

    asyncio.run(main())


def test_what_nobody_waits_for_any_more_is_disposed_of():
    async def main() -> None:
        threads, begun, go = DaemonThreads(1), threading.Event(), threading.Event()
        disposed: list[str] = []

        def make() -> str:
            begun.set()
            go.wait()
            return "made"

        task = asyncio.create_task(threads.run(make, unwanted=disposed.append))
        assert await heard(begun)
        await cancelled(task)
        assert threads.num_unwanted == 1
        go.set()
        await asyncio.to_thread(threads.wait_disposed, LIMIT_S)
        assert (disposed, threads.num_unwanted) == (["made"], 0)
        threads.close()

    asyncio.run(main())


def test_what_comes_while_the_wait_for_it_is_being_cancelled_is_disposed_of():
    async def main() -> None:
        threads, disposed = DaemonThreads(1), []
        task = asyncio.create_task(threads.run(lambda: "made", unwanted=disposed.append))
        await asyncio.sleep(0)
        while threads._num_busy:  # the loop stands still, so that nobody hears of the result
            time.sleep(0.001)
        await cancelled(task)
        await asyncio.to_thread(threads.wait_disposed, LIMIT_S)
        assert disposed == ["made"]
        assert threads.num_hung == 0
        threads.close()

    asyncio.run(main())
