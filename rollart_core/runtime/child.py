"""The program a part's process runs: build one object, answer calls on it until the run is gone.

Takes: the number of an inherited socket. Gives: answers. Never: outlives the process that started
it (end of the stream ends it, and on Linux the kernel kills it with its parent).
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollart_core.errors import RollartError, first_line
from rollart_core.runtime.frames import STREAM_LIMIT_BYTES, Answer, Call, encode, receive

_PR_SET_PDEATHSIG = 1


class _Host:
    """Holds the part and runs calls on it: coroutines on the loop, the rest on one thread."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.part: Any = None
        self.writer = writer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="part")
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call = await receive(reader)
                assert isinstance(call, Call)
                task = asyncio.create_task(self._answer(call))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.call_id, value=await self._run(call))
        except Exception as e:
            answer = Answer(call.call_id, error=_portable(e))
        try:
            frame = encode(answer)
        except Exception as e:
            frame = encode(Answer(call.call_id, error=RollartError(f"unsendable answer: {e}")))
        with contextlib.suppress(ConnectionError):
            self.writer.write(frame)
            await self.writer.drain()

    async def _run(self, call: Call) -> Any:
        function = self._find(call.name)
        if inspect.iscoroutinefunction(function):
            return await function(*call.args, **call.kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, lambda: function(*call.args, **call.kwargs))

    def _find(self, name: str) -> Any:
        if name == "__build__":
            return self._build
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return getattr(self.part, name)

    def _build(self, factory: str, kwargs: dict[str, Any]) -> None:
        self.part = self._find(factory)(**kwargs)


def _portable(error: Exception) -> Exception:
    """Return the error if it survives the journey, else a plain one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RollartError(f"{type(error).__name__}: {first_line(str(error))}")
    return error


def _die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process with its parent (elsewhere the end of the stream does)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


async def _main(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    reader, writer = await asyncio.open_connection(sock=sock, limit=STREAM_LIMIT_BYTES)
    await _Host(writer).serve(reader)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's own process decides what Ctrl-C means
    _die_with_parent(int(sys.argv[2]))
    asyncio.run(_main(int(sys.argv[1])))
    if "rollart_core.boxes.source" in sys.modules:  # os._exit calls no atexit
        sys.modules["rollart_core.boxes.source"].close_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a hung environment thread must not keep the process alive
