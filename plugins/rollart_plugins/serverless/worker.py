"""The program of one worker of the pool: scores what comes by stdin, answers by stdout.

    first line in    {"reward": ID, "options": {...}, "num_threads": n}
    first line out   ready {...} | no {"message": why}
    then in          NUMBER CALL            and out    NUMBER ANSWER or refusal, in any order

Takes: lines. Gives: lines. Never: outlives the process that started it (the end of stdin ends it,
and on Linux the kernel kills it with its parent), or lets a reward's prints among its answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any, BinaryIO

from rollart_core.errors import RollartError, described, first_line, text_of
from rollart_core.runtime.host import die_with_parent, leave
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.wire import Refused

LINE_BYTES = 64 << 20
"""Longest line, either way."""
READY = b"ready"


class _Server:
    """Answers calls, each in a task of its own."""

    def __init__(self, function: RewardFunction, out: BinaryIO) -> None:
        self._function, self._out = function, out
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: bytes) -> None:
        number, _, body = line.partition(b" ")
        try:
            answer = await self._function.answer(body)
        except Refused as e:
            answer = e.body()
        except Exception as e:
            answer = Refused("internal", described(e)).body()
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._write)
        self._ready.append(number + b" " + answer + b"\n")

    def _write(self) -> None:
        """Write together what is ready together."""
        lines, self._ready = b"".join(self._ready), []
        self._out.write(lines)
        self._out.flush()


async def _main(out: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    asked: dict[str, Any] = json.loads(await reader.readline())
    try:
        function = RewardFunction(
            asked["reward"], asked["options"], num_threads=asked["num_threads"]
        )
    except Exception as e:
        shown = text_of(e) if isinstance(e, RollartError) else described(e)
        out.write(b"no " + wire.dumps({"message": first_line(shown)}) + b"\n")
        out.flush()
        return
    out.write(READY + b" {}\n")
    out.flush()
    await _Server(function, out).serve(reader)
    await function.close()


def main() -> None:
    """Serve until stdin ends; the parent's process id is the only argument, 0 in a box."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's own process decides what Ctrl-C means
    if parent_pid := int(sys.argv[1]):
        die_with_parent(parent_pid)  # it may hang where no stdin is read
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward prints goes to stderr
    asyncio.run(_main(out))
    leave()
    os._exit(0)  # a reward that hangs must not keep the process alive


if __name__ == "__main__":
    main()
