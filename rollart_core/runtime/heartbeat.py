"""Heartbeats, which detect workers that hang. A worker that hangs is killed.

    every_s -> worker.call("__ping__") -> no answer for hang_s -> worker.kill() -> on_death

Takes: workers. Gives: the death of workers that do not answer in time. Never: decides what happens
to a dead worker (its owner does), or detects slow work: the loop of the worker's process answers
the ping, while the work runs in its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done
from rollart_core.runtime.worker import Worker

Notify = Callable[[str, Mapping[str, object]], None]
"""Event callback of a run: the kind of the event, and its payload as plain JSON."""


def nobody_listens(kind: str, payload: Mapping[str, object]) -> None:
    """Ignore the event."""


class Heartbeat:
    """Pings workers until they end.

    Args:
        every_s: Seconds between an answer and the next ping.
        hang_s: A worker that does not answer for this many seconds is killed; None: no pings.
        notify: Event callback for each worker that hung.
    """

    def __init__(
        self, *, every_s: float, hang_s: float | None, notify: Notify = nobody_listens
    ) -> None:
        self._every_s = every_s
        self._hang_s = hang_s
        self._notify = notify
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, worker: Worker) -> None:
        """Ping a worker from when it is up until it ends or is closed.

        Call this once the object is built: during imports a process may not answer for seconds.
        """
        if self._hang_s is None:
            return
        task = asyncio.create_task(self._watch(worker, self._hang_s), name=f"ping {worker.name}")
        keep_until_done(task, self._tasks)

    async def close(self) -> None:
        """Stop all pings."""
        await cancel_and_wait(*self._tasks)

    async def _watch(self, worker: Worker, hang_s: float) -> None:
        was_up = False
        while worker.alive or not was_up:
            was_up = was_up or worker.alive
            if worker.alive and not await self._answers(worker, hang_s):
                self._notify("part_hung", {"part": worker.name, "silent_s": hang_s})
                worker.kill()
                return
            await asyncio.sleep(self._every_s)

    async def _answers(self, worker: Worker, hang_s: float) -> bool:
        ping = asyncio.ensure_future(_ping(worker))
        try:
            await asyncio.wait({ping}, timeout=hang_s)
            if not ping.done():
                # Perhaps this process was stopped, not the worker: read pending answers first.
                await asyncio.wait({ping}, timeout=min(1.0, hang_s))
            return ping.done()
        finally:
            ping.cancel()


async def _ping(worker: Worker) -> None:
    """Return when the worker has answered, also with an error, or has ended."""
    with suppress(Exception):  # an error is an answer too
        await worker.call("__ping__")
