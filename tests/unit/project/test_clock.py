"""Clocks that tests move, and processes that they wait for."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from support.clock import pass_s, run_virtual
from support.processes import is_running, wait_gone

DAY_S = 86_400.0


def test_on_a_virtual_loop_time_jumps_to_the_next_timer() -> None:
    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        await asyncio.gather(after("late", DAY_S), after("soon", 1.0))
        return asyncio.get_running_loop().time(), order

    assert run_virtual(main()) == (DAY_S, ["soon", "late"])


def test_a_limit_passes_when_the_clock_is_moved() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), DAY_S))
        await asyncio.sleep(0)
        pass_s(DAY_S)
        with pytest.raises(TimeoutError):
            await waiting

    asyncio.run(main())


def test_a_process_that_nobody_has_reaped_has_ended() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert is_running(process.pid)
        process.kill()
        wait_gone(process.pid)
        assert os.path.exists(f"/proc/{process.pid}")
    assert not is_running(process.pid)
