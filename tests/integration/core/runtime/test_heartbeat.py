"""Parts that hang, in processes of their own: found, killed, and what their owners make of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.pace import scaled

from rollart_core.errors import WorkerDied
from rollart_core.runtime.heartbeat import Heartbeat
from rollart_core.runtime.process import WorkerProcess


class Busy:
    """A part that works until it is told that it is enough."""

    def work(self, enough: str) -> str:
        while not Path(enough).exists():
            time.sleep(0.01)
        return "done"


FACTORY = f"{__name__}:Busy"


def test_a_part_that_hangs_is_killed_and_one_that_works_is_not(tmp_path):
    enough = tmp_path / "enough"

    async def main() -> None:
        events = []

        def watch(part: WorkerProcess, hang_s: float) -> Heartbeat:
            beat = Heartbeat(
                every_s=0.05, hang_s=hang_s, notify=lambda *event: events.append(event)
            )
            beat.watch(part)
            return beat

        hangs, works = WorkerProcess("hangs"), WorkerProcess("works")
        died = asyncio.Event()
        hangs.on_death = lambda _: died.set()
        patient = watch(works, scaled(60.0))  # before it is up
        for part in (hangs, works):
            await part.start(FACTORY)
        waiting = asyncio.create_task(hangs.call("work", str(enough)))
        working = asyncio.create_task(works.call("work", str(enough)))
        os.kill(hangs.pid, signal.SIGSTOP)
        impatient = watch(hangs, 0.2)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await waiting
        await died.wait()
        for _ in range(3):
            await works.call("__ping__")  # answered while it works
        assert not working.done()
        enough.touch()
        assert await working == "done"
        assert events == [("part_hung", {"part": "hangs", "silent_s": 0.2})]
        assert works.alive
        for beat in (patient, impatient):
            await beat.close()
        for part in (hangs, works):
            await part.close()

    asyncio.run(main())


def test_nothing_is_pinged_without_a_limit():
    async def main() -> None:
        heartbeat = Heartbeat(every_s=0.01, hang_s=None)
        part = WorkerProcess("stopped")
        await part.start(FACTORY)
        heartbeat.watch(part)
        assert len(asyncio.all_tasks()) == 1  # this one
        await part.close()

    asyncio.run(main())
