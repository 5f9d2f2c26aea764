"""What runs inside a Ray actor: one part, and the calls on it.

Takes: pickled calls, several at once. Gives: pickled answers, likewise: a call of Ray's costs more
than most of ours. Never: imports ray (the driver makes an actor of the class), or gets an object of
the driver; plugins are resolved here, from this node's entry points.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollart_core.errors import RollartError, described, is_from_outside
from rollart_core.runtime.frames import Answer, Call
from rollart_core.runtime.host import WorkerHost, leave, portable


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """How an actor's process is set up before it builds its part."""

    environment: Mapping[str, str] = field(default_factory=dict)
    log_path: str | None = None
    """Where stdout and stderr go, if that folder is to be reached from its node."""
    sys_path: Sequence[str] = ()
    """The driver's import path; what of it is here is searched last."""


class WorkerActor:
    """An actor that holds one part of a run."""

    def __init__(self, settings: ActorSettings) -> None:
        """Set up this process; the part is built by a call."""
        os.environ.update(settings.environment)  # before torch, which reads it when it is imported
        sys.path += [p for p in settings.sys_path if p not in sys.path and os.path.isdir(p)]
        if settings.log_path is not None:
            _log_to(Path(settings.log_path))
        self._host = WorkerHost()
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[tuple[int, bytes]] = []
        self._answered = asyncio.Event()

    async def hello(self) -> int:
        """Return this process's id."""
        return os.getpid()

    async def take(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Begin calls, each with its id; :meth:`answers` gives what comes of them."""
        for call_id, frame in frames:
            task = asyncio.create_task(self._run(call_id, frame))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def answers(self) -> list[tuple[int, bytes]]:
        """Return what is answered since last asked, each with its call's id, once there is any.

        Who waits for this hears of the end of the actor, too.
        """
        await self._answered.wait()
        self._answered.clear()
        found, self._answers = self._answers, []
        return found

    async def leave(self) -> None:
        """Close what this process has open; it can be killed then."""
        await asyncio.get_running_loop().run_in_executor(None, leave)

    async def _run(self, call_id: int, frame: bytes) -> None:
        """Run a call; what it raises is its answer."""
        try:
            call: Call = pickle.loads(frame)
            answer = Answer(call_id, await self._host.run(call.name, call.args, call.kwargs))
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
    """Send stdout and stderr to a file; without its folder they stay where Ray sends them."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
