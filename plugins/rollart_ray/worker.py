"""Both ends of a worker in an actor of a Ray cluster: :class:`RayWorker` here, and the actor there.

    RayWorker --concurrent calls, in one Ray call--> WorkerActor, which holds the worker
              <--results, likewise------------------ on its node

Takes: a slot on the cluster, and the settings of the actor's process. Gives: the interface of
:class:`rollart_core.runtime.worker.Worker`. A Ray call costs more than most of our calls, so calls
and results are pickled and sent together. Never: leaves the actor behind, or lets a caller wait for
an actor that is gone. Nothing in the actor imports ray (the driver makes an actor of the class) or
receives an object of the driver; plugins are resolved there, from that node's entry points.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollart_core.errors import RollartError, WorkerDied, described, first_line, is_from_outside
from rollart_core.runtime.child import WorkerHost, leave, portable
from rollart_core.runtime.frames import Answer, Call
from rollart_core.runtime.records import StoredRecords, unpack
from rollart_ray.pools import ResourceSlot

if TYPE_CHECKING:
    from rollart_ray.cluster import RayCluster

Frames: TypeAlias = Sequence[tuple[int, bytes]]
"""Ids of calls, and the pickled calls or answers."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A slot that is reserved: a bundle of a placement group."""

    slot: ResourceSlot
    group: Any
    index: int
    taken_by: RayWorker | None = field(default=None)
    num_beside: int = 0
    """Workers that share this slot without a reservation."""

    @property
    def is_free(self) -> bool:
        """True if no running or starting worker has it."""
        return self.taken_by is None or self.taken_by.ended


class RayWorker:
    """One worker of a run in an actor.

    Args:
        name: Its name in errors and the log.
        cluster: The cluster.
        find_reservation: Returns its slot.
        settings: Settings of its process.
        variables: Environment variables of its process that may be secret.
    """

    def __init__(
        self,
        name: str,
        cluster: RayCluster,
        find_reservation: Callable[[], Awaitable[Reservation]],
        settings: ActorSettings,
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.on_death: Callable[[RayWorker], None] | None = None
        self.pid: int | None = None
        """Of its process, on its node; None until it is up."""
        self._cluster = cluster
        self._find_reservation = find_reservation
        self._settings = settings
        self._variables = dict(variables or {})
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
        """True if it is gone, or about to be."""
        return self._gone is not None or self._closing

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the actor and build the worker in it.

        Raises:
            WorkerDied: If it does not start.
        """
        reserved = await self._find_reservation()
        reserved.taken_by = self
        self._actor = self._cluster.new_actor(
            reserved.slot, reserved.group, reserved.index, self._settings
        )
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.name}")
        try:
            async with asyncio.timeout(self._cluster.patience_s):
                self.pid = await self._ask(self._actor.hello, self._variables)
        except TimeoutError:
            self.lose(f"no process within {self._cluster.patience_s:g} s: its node may be gone")
            raise WorkerDied(self._exit_reason()) from None
        if factory is not None:
            await self.call("__build__", factory, dict(kwargs or {}))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker (or ``"module:function"``) and wait for its result.

        Raises:
            WorkerDied: If the actor is gone before or during the call.
            Exception: Whatever the method raised.
        """
        if not self.alive:
            raise WorkerDied(self._exit_reason())
        call_id = next(self._ids)
        frame = pickle.dumps(Call(call_id, method, args, kwargs), protocol=5)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        stored = [arg.content for arg in args if isinstance(arg, RecordObject)]
        if stored:
            self._start_sending([(call_id, frame)], stored)
        else:
            self._send(call_id, frame)
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def kill(self) -> None:
        """Kill the actor now, as if it had died."""
        if self._actor is not None:
            self._cluster.kill(self._actor)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Let the actor close its resources, and kill it after ``grace_s`` at the latest."""
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
        self.kill()  # an unreachable actor must not continue
        for task in (*self._direct, *self._sending):
            task.cancel()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerDied(self._exit_reason()))
        if not self._closing and self.on_death is not None:
            self.on_death(self)

    async def _answer(self, ref: Any) -> Any:
        """Wait for a result while the actor is alive.

        Raises:
            WorkerDied: If it is gone.
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
        """Send a call together with all others of the same iteration of the loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((call_id, frame))

    def _flush(self) -> None:
        frames, self._outbox = self._outbox, []
        self._start_sending(frames)

    def _start_sending(self, frames: Frames, stored: Sequence[Any] = ()) -> None:
        task = asyncio.create_task(self._take(frames, stored))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _take(self, frames: Frames, stored: Sequence[Any]) -> None:
        with contextlib.suppress(WorkerDied):  # each of the calls gets the error
            await self._ask(self._actor.take, frames, *stored)

    async def _ask(self, method: Any, *args: Any) -> Any:
        """Call the actor itself.

        Raises:
            WorkerDied: If it is gone, or this process has no Ray connection.
        """
        try:
            ref = method.remote(*args)
        except Exception as e:
            self.lose(first_line(str(e)) or type(e).__name__)
            raise WorkerDied(self._exit_reason()) from None
        return await self._answer(ref)

    async def _watch(self) -> None:
        """Deliver results until the actor is gone."""
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
    """Deliver a result; an unreadable one is an error of that call only."""
    try:
        answer: Answer = pickle.loads(frame)
    except Exception as e:
        future.set_exception(RollartError(f"unreadable answer: {e}"))
        return
    if answer.error is not None:
        future.set_exception(answer.error)
    else:
        future.set_result(answer.value)


@dataclass(frozen=True, slots=True)
class RecordObject(StoredRecords):
    """Records in the cluster's object store, which a node fetches once for all its actors.

    Ray only resolves references that are arguments of its own call, so the pickled form is empty.
    """

    content: Any = None
    """The reference in this process; in an actor, the stored bytes."""

    def __reduce__(self) -> tuple[type[RecordObject], tuple[()]]:
        return RecordObject, ()

    def load(self) -> list[Any]:
        """See :meth:`StoredRecords.load`."""
        return unpack(self.content)


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Settings of an actor's process, applied before it builds its worker."""

    environment: Mapping[str, str] = field(default_factory=dict)
    log_path: str | None = None
    """The file for stdout and stderr, if its node can reach that folder."""
    sys_path: Sequence[str] = ()
    """The driver's import path; its existing folders are searched last."""


class WorkerActor:
    """An actor that holds one worker of a run."""

    def __init__(self, settings: ActorSettings) -> None:
        """Set up this process; the worker is built by a call."""
        os.environ.update(settings.environment)  # before torch, which reads it when it is imported
        sys.path += [p for p in settings.sys_path if p not in sys.path and os.path.isdir(p)]
        if settings.log_path is not None:
            _log_to(Path(settings.log_path))
        self._host = WorkerHost()
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[tuple[int, bytes]] = []
        self._answered = asyncio.Event()

    async def hello(self, variables: Mapping[str, str]) -> int:
        """Set environment variables and return this process's id.

        The arguments of a call, unlike those of the constructor, are not stored by the cluster.
        """
        os.environ.update(variables)
        return os.getpid()

    async def take(self, frames: Frames, *stored: Any) -> None:
        """Start calls, each with its id; :meth:`answers` returns the results.

        Args:
            frames: The ids and the pickled calls.
            *stored: The contents of the stored records among the arguments of a single call.
        """
        for call_id, frame in frames:
            task = asyncio.create_task(self._run(call_id, frame, stored))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def answers(self) -> list[tuple[int, bytes]]:
        """Wait for results, and return the new ones, each with its call's id.

        A waiting caller also gets an error if the actor ends.
        """
        await self._answered.wait()
        self._answered.clear()
        found, self._answers = self._answers, []
        return found

    async def leave(self) -> None:
        """Close this process's resources; it can be killed afterwards."""
        await asyncio.get_running_loop().run_in_executor(None, leave)

    async def _run(self, call_id: int, frame: bytes, stored: Sequence[Any]) -> None:
        """Run a call; an exception is its result."""
        try:
            call: Call = pickle.loads(frame)
            contents = iter(stored)
            args = [
                RecordObject(next(contents)) if isinstance(arg, RecordObject) else arg
                for arg in call.args
            ]
            answer = Answer(call_id, await self._host.run(call.name, args, call.kwargs))
        except BaseException as e:
            if is_from_outside(e):
                raise
            answer = Answer(call_id, error=portable(e))
        try:
            answered = pickle.dumps(answer, protocol=5)
        except BaseException as e:
            error = RollartError(f"unsendable answer: {described(e)}")
            answered = pickle.dumps(Answer(call_id, error=error), protocol=5)
        self._answers.append((call_id, answered))
        self._answered.set()


def _log_to(path: Path) -> None:
    """Redirect stdout and stderr to a file; without its folder, Ray's files are used."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
