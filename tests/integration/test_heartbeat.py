"""Parts that hang, in processes of their own: found, killed, and what their owners make of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from rollart_core.errors import PartDied
from rollart_core.runtime.heartbeat import Heartbeat
from rollart_core.runtime.process import PartProcess


class Busy:
    """A part that works for long."""

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"


FACTORY = f"{__name__}:Busy"
PATIENCE = {"every_s": 0.05, "hang_s": 3.0}


def test_a_part_that_hangs_is_killed_and_one_that_works_is_not():
    async def main() -> None:
        events = []
        heartbeat = Heartbeat(**PATIENCE, tell=lambda kind, what: events.append((kind, what)))
        hangs, works = PartProcess("hangs"), PartProcess("works")
        died = asyncio.Event()
        hangs.on_death = lambda _: died.set()
        for part in (hangs, works):
            heartbeat.watch(part)  # before it is up
            await part.start(FACTORY)
        waiting = asyncio.create_task(hangs.call("work", 60))
        working = asyncio.create_task(works.call("work", 1.0))
        os.kill(hangs.pid, signal.SIGSTOP)
        with pytest.raises(PartDied, match="SIGKILL"):
            await waiting
        await died.wait()
        assert await working == "done"
        assert events == [("part_hung", {"part": "hangs", "silent_s": 3.0})]
        assert works.alive
        await heartbeat.close()
        for part in (hangs, works):
            await part.close()

    asyncio.run(main())


def test_nothing_is_pinged_without_a_limit():
    async def main() -> None:
        heartbeat = Heartbeat(every_s=0.01, hang_s=None)
        part = PartProcess("stopped")
        await part.start(FACTORY)
        heartbeat.watch(part)
        assert len(asyncio.all_tasks()) == 2  # this one, and the part's reader
        await part.close()

    asyncio.run(main())
