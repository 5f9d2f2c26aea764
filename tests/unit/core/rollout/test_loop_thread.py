"""A loop in a thread of its own: what ends with it, and what does not end it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest
from support.pace import scaled

from rollart_core.rollout.loop import LoopThread

LIMIT_S = scaled(60)


async def value(it: object) -> object:
    return it


def test_closing_ends_all_tasks_then_what_is_last_then_the_thread() -> None:
    loop, begun, order = LoopThread("test"), threading.Event(), []

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("task")

    async def last() -> None:
        order.append("last")

    pending = loop.submit(waits())
    assert begun.wait(LIMIT_S)
    loop.close(last, wait_s=LIMIT_S)
    assert order == ["task", "last"]
    assert not loop.is_alive
    with pytest.raises(CancelledError):
        pending.result(LIMIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(value(1))
    loop.close()


def test_what_would_end_the_process_does_not_end_the_loop() -> None:
    async def leave() -> None:
        raise SystemExit(1)

    loop = LoopThread("test")
    with pytest.raises(SystemExit):
        loop.run(leave())
    assert loop.run(value("still here")) == "still here"
    loop.close(wait_s=LIMIT_S)
    assert not loop.is_alive


def test_a_task_that_blocks_its_loop_does_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart_core.rollout.loop.END_S", 0.05)
    loop, begun, go = LoopThread("test"), threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        go.wait(LIMIT_S)

    pending = loop.submit(blocks())
    assert begun.wait(LIMIT_S)
    assert not asyncio.run(loop.end_tasks())
    go.set()
    pending.result(LIMIT_S)
    monkeypatch.setattr("rollart_core.rollout.loop.END_S", LIMIT_S)
    assert asyncio.run(loop.end_tasks())
    loop.close(wait_s=LIMIT_S)


def test_a_loop_that_was_never_used_has_no_thread() -> None:
    loop = LoopThread("test")
    assert asyncio.run(loop.end_tasks())
    loop.close()
    assert not loop.is_alive
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(value(1))
