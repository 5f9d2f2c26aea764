"""The program a worker's process runs: build one object, answer calls on it until the run is gone.

Takes: the number of an inherited socket. Gives: answers. Never: outlives the process that started
it (end of the stream ends it, and on Linux the kernel kills it with its parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import NoReturn

from rollart_core.errors import RollartError, described, is_from_outside
from rollart_core.runtime.frames import STREAM_LIMIT_BYTES, Answer, Call, encode, receive
from rollart_core.runtime.host import WorkerHost, die_with_parent, leave, portable


class _Server:
    """Answers calls on the part that this process holds."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.host = WorkerHost()
        self.writer = writer
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
        with contextlib.suppress(ConnectionError):
            self.writer.write(frame)
            await self.writer.drain()


async def _answer_calls(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    reader, writer = await asyncio.open_connection(sock=sock, limit=STREAM_LIMIT_BYTES)
    await _Server(writer).serve(reader)


def main(fd: int, parent_pid: int) -> NoReturn:
    """Answer calls until the run is gone, and end the process.

    Args:
        fd: The number of the inherited socket.
        parent_pid: The process that this one does not outlive.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's own process decides what Ctrl-C means
    die_with_parent(parent_pid)
    os.set_inheritable(fd, False)  # what it starts must not keep the stream open when it has ended
    asyncio.run(_answer_calls(fd))
    leave()
    os._exit(0)  # a hung environment thread must not keep the process alive


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
