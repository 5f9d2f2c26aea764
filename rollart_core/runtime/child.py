"""The program of a worker's process, which builds one object and answers calls on it.

Takes: the number of an inherited socket. Gives: results of calls. Never: lets a long call block the
loop (coroutines run on the loop, other functions on one thread), or outlives the process that
started it (it ends with the stream, and on Linux the kernel kills it with its parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import os
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

from rollart_core.errors import RollartError, contained, described, is_from_outside
from rollart_core.rollout.asyncio_tasks import keep_until_done
from rollart_core.rollout.loop import run_exit_functions
from rollart_core.runtime.frames import Answer, Call, FrameProtocol, encode
from rollart_core.runtime.records import StoredRecords

_PR_SET_PDEATHSIG = 1


class WorkerHost:
    """Holds the object of a worker's process, and runs calls on it."""

    def __init__(self) -> None:
        self.target: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    def run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Awaitable[Any]:
        """Run a method of the object, or ``"module:function"``.

        Awaiting the result raises any error of the function.

        Raises:
            AttributeError: If the name does not exist.
        """
        function = self._find(name)
        if inspect.iscoroutinefunction(function):
            return cast("Awaitable[Any]", function(*args, **kwargs))
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, _contained, function, args, kwargs)

    def _find(self, name: str) -> Any:
        if name == "__build__":
            return self._build
        if name == "__ping__":
            return _pong
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return getattr(self.target, name)

    def _build(self, factory: str, kwargs: dict[str, Any]) -> None:
        self.target = self._find(factory)(**kwargs)


def _contained(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on the worker's thread; its errors end neither the thread nor the loop.

    Stored records among the arguments are loaded.
    """
    try:
        given = [arg.load() if isinstance(arg, StoredRecords) else arg for arg in args]
        return function(*given, **kwargs)
    except BaseException as e:
        raise contained(e) from e


async def _pong() -> None:
    """Answer a ping, which shows that the loop of this process runs."""


def portable(error: BaseException) -> Exception:
    """Return the error if it can be pickled, else a RollartError with the same text."""
    try:
        if isinstance(error, Exception):
            again = pickle.loads(pickle.dumps(error))
            if type(again) is type(error) and isinstance(str(again), str):
                return error
    except BaseException:  # methods of the error may raise; the caller still gets an answer
        pass
    return RollartError(described(error))


def die_with_parent(parent_pid: int) -> None:
    """Make Linux kill this process with its parent; elsewhere the end of the stream ends it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignore the signals that the run's main process handles; a cluster may send them to all.

    The handler is not inherited by programs that this process starts, unlike SIG_IGN, and processes
    that it forks end as usual.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_pid = os.getpid()

    def ignore(number: int, frame: object) -> None:
        if os.getpid() != own_pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ignore)


def leave() -> None:
    """Run the exit functions and flush the output, before the process ends without atexit."""
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()


class _Server:
    """Answers calls on the object of this process."""

    def __init__(self) -> None:
        self.host = WorkerHost()
        self.tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        self.stream = FrameProtocol(self._take, self.ended.set)

    def _take(self, call: Call | Answer) -> None:
        assert isinstance(call, Call)
        keep_until_done(asyncio.create_task(self._answer(call)), self.tasks)

    async def _answer(self, call: Call) -> None:
        try:
            value = await self.host.run(call.name, call.args, call.kwargs)
            answer = Answer(call.call_id, value=value)
        except BaseException as e:
            if is_from_outside(e):
                raise
            answer = Answer(call.call_id, error=portable(e))
        try:
            frame = encode(answer)
        except BaseException as e:
            unsendable = RollartError(f"unsendable answer: {described(e)}")
            frame = encode(Answer(call.call_id, error=unsendable))
        if not self.ended.is_set():
            self.stream.transport.write(frame)


async def _answer_calls(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    server = _Server()
    await asyncio.get_running_loop().create_connection(lambda: server.stream, sock=sock)
    await server.ended.wait()


def main(fd: int, parent_pid: int) -> NoReturn:
    """Answer calls until the stream ends, then end the process.

    Args:
        fd: The number of the inherited socket.
        parent_pid: The id of the parent; this process ends with it.
    """
    leave_signals_to_parent()
    die_with_parent(parent_pid)
    os.set_inheritable(fd, False)  # descendants must not keep the stream open
    asyncio.run(_answer_calls(fd))
    leave()
    os._exit(0)  # a hung environment thread must not keep the process alive


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
