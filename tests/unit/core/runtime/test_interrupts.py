"""Ctrl-C, preemption, and what is neither."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollart_core.runtime.interrupts import (
    EXIT_CODES,
    INTERRUPTED,
    PREEMPTED,
    REASONS,
    interrupts,
    sigterm_is_ctrl_c,
)


async def waits(**given) -> None:
    with interrupts(**given):
        await asyncio.Event().wait()


async def signalled(number: signal.Signals, **given) -> None:
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
    await waits(**given)


def test_ctrl_c_ends_the_task_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(signalled(signal.SIGINT))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preemption_ends_the_task_with_its_exit_code(number) -> None:
    with pytest.raises(SystemExit) as ended:
        asyncio.run(signalled(number))
    assert ended.value.code == EXIT_CODES[PREEMPTED] == 75


def test_who_cancels_is_not_told_of_a_ctrl_c() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_the_first_signal_may_be_seen_to_in_order_and_the_second_is_not() -> None:
    seen: list[str] = []

    async def twice() -> None:
        loop = asyncio.get_running_loop()

        def in_order(reason: str) -> bool:
            seen.append(reason)
            loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
            return len(seen) == 1

        loop.call_soon(os.kill, os.getpid(), signal.SIGUSR1)
        await waits(ends_in_order=in_order)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(twice())
    assert seen == [PREEMPTED, INTERRUPTED]


def test_signals_are_given_back() -> None:
    async def over() -> None:
        with interrupts():
            pass
        assert not any(map(asyncio.get_running_loop().remove_signal_handler, REASONS))

    asyncio.run(over())


def test_outside_a_loop_sigterm_is_a_ctrl_c_and_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_a_thread_signals_are_left_alone() -> None:
    def inside() -> object:
        with sigterm_is_ctrl_c():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == signal.getsignal(signal.SIGTERM)
