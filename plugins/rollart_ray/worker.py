"""A part in an actor of a Ray cluster: started, called, watched and ended.

Takes: a seat on the cluster, and how its process is set up. Gives: the shape of
:class:`rollart_core.runtime.worker.Worker`; calls made at once travel together, and so do answers.
Never: leaves the actor behind, or lets a caller wait for one that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart_core.errors import RollartError, WorkerDied, first_line
from rollart_core.runtime.frames import Answer, Call
from rollart_ray.actor import ActorSettings
from rollart_ray.cluster import RayCluster
from rollart_ray.pools import ResourceSlot


@dataclass(slots=True, eq=False)
class Reservation:
    """A seat that is reserved: a bundle of a placement group."""

    seat: ResourceSlot
    group: Any
    index: int
    taken_by: RayWorker | None = field(default=None)
    num_beside: int = 0
    """Parts that sat down here beside it, and reserve nothing."""

    @property
    def is_free(self) -> bool:
        """True when no part has it that lives or is to live."""
        return self.taken_by is None or self.taken_by.ended


class RayWorker:
    """One part of a run in an actor.

    Args:
        name: What errors and the log call it.
        cluster: Where it is.
        find_berth: Returns the seat it takes.
        settings: How its process is set up.
    """

    def __init__(
        self,
        name: str,
        cluster: RayCluster,
        find_berth: Callable[[], Awaitable[Reservation]],
        settings: ActorSettings,
    ) -> None:
        self.name = name
        self.on_death: Callable[[RayWorker], None] | None = None
        self.pid: int | None = None
        """Of its process, on its node; None until it is up."""
        self._cluster = cluster
        self._find_berth = find_berth
        self._settings = settings
        self._actor: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._gone: str | None = None
        self._closing = False
        self._direct: set[asyncio.Task[Any]] = set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[tuple[int, bytes]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()

    @property
    def alive(self) -> bool:
        """True while it can be called: from when its process is up."""
        return self.pid is not None and self._gone is None

    @property
    def ended(self) -> bool:
        """True when it is gone, or about to be."""
        return self._gone is not None or self._closing

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Bring the actor up and build the part in it.

        Raises:
            WorkerDied: When it does not come up.
        """
        berth = await self._find_berth()
        berth.taken_by = self
        self._actor = self._cluster.new_actor(berth.seat, berth.group, berth.index, self._settings)
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.name}")
        try:
            async with asyncio.timeout(self._cluster.patience_s):
                self.pid = await self._ask(self._actor.hello)
        except TimeoutError:
            self.lose(f"no process within {self._cluster.patience_s:g} s: its node may be gone")
            raise WorkerDied(self._exit_reason()) from None
        if factory is not None:
            await self.call("__build__", factory, dict(kwargs or {}))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the part (or ``"module:function"``) and wait for its answer.

        Raises:
            WorkerDied: When the actor is gone, before or meanwhile.
            Exception: Whatever the method raised.
        """
        if not self.alive:
            raise WorkerDied(self._exit_reason())
        call_id = next(self._ids)
        frame = pickle.dumps(Call(call_id, method, args, kwargs), protocol=5)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(call_id, frame)
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def kill(self) -> None:
        """End the actor now, as if it had died."""
        if self._actor is not None:
            self._cluster.kill(self._actor)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Let the actor close what it has open, and end it after ``grace_s`` at the latest."""
        self._closing = True
        if self.alive:
            with contextlib.suppress(WorkerDied, TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._ask(self._actor.leave)
        if not self._gone:
            self.kill()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=max(grace_s, 1.0))
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.lose("closed")

    def lose(self, why: str) -> None:
        """Treat it as gone from now on."""
        if self._gone is not None:
            return
        self._gone = why
        self.kill()  # one that only cannot be reached must not go on
        for task in (*self._direct, *self._sending):
            task.cancel()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerDied(self._exit_reason()))
        if not self._closing and self.on_death is not None:
            self.on_death(self)

    async def _answer(self, ref: Any) -> Any:
        """Wait for an answer, as long as the actor lives.

        Raises:
            WorkerDied: When it is gone.
        """
        call = asyncio.ensure_future(self._cluster.answer(ref))
        self._direct.add(call)
        try:
            await asyncio.wait([call])
        finally:
            self._direct.discard(call)
            call.cancel()
        if call.cancelled():
            raise WorkerDied(self._exit_reason())
        error = call.exception()
        if error is not None:
            self.lose(str(error))
            raise WorkerDied(self._exit_reason())
        return call.result()

    def _send(self, call_id: int, frame: bytes) -> None:
        """Send a call together with all that are made in the same turn of the loop."""
        if not self._outbox:
            task = asyncio.create_task(self._flush())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        self._outbox.append((call_id, frame))

    async def _flush(self) -> None:
        frames, self._outbox = self._outbox, []
        with contextlib.suppress(WorkerDied):  # each of the calls hears of it
            await self._ask(self._actor.take, frames)

    async def _ask(self, method: Any, *args: Any) -> Any:
        """Call the actor itself.

        Raises:
            WorkerDied: When it is gone, or Ray is from this process.
        """
        try:
            ref = method.remote(*args)
        except Exception as e:
            self.lose(first_line(str(e)) or type(e).__name__)
            raise WorkerDied(self._exit_reason()) from None
        return await self._answer(ref)

    async def _watch(self) -> None:
        """Hand out answers until the actor is gone."""
        with contextlib.suppress(WorkerDied):
            while True:
                for call_id, frame in await self._ask(self._actor.answers):
                    future = self._calls.get(call_id)
                    if future is not None and not future.done():  # else its caller has given up
                        _settle(future, frame)

    def _exit_reason(self) -> str:
        log = self._settings.log_path
        where = f"; see {log}" if log and os.path.exists(log) else ""
        return f"the {self.name} actor is gone ({self._gone or 'not started'}){where}"


def _settle(future: asyncio.Future[Any], frame: bytes) -> None:
    """Give a caller its answer; one that cannot be read is an error of that call alone."""
    try:
        answer: Answer = pickle.loads(frame)
    except Exception as e:
        future.set_exception(RollartError(f"unreadable answer: {e}"))
        return
    if answer.error is not None:
        future.set_exception(answer.error)
    else:
        future.set_result(answer.value)
