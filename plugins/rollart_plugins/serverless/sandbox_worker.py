"""A pool worker in a sandbox: both sides of its line protocol over stdin and stdout.

    in     NUMBER METHOD BODY       and out    NUMBER ANSWER, in any order
    0      build {"reward_id": ID, "options": {...}, "num_threads": n} -> nothing, or an error
    n      answer CALL              -> the answer, or a refusal, of the wire
    n      close                    -> nothing

Data from a sandbox is parsed as JSON. A worker without a sandbox is a process of the run
(:mod:`rollart_core.runtime.process`) and answers in pickles.

Takes: calls. Gives: answers, or WorkerDied. Never: leaves a sandbox running once closed, or mixes
the output of a reward with its answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import (
    ConfigError,
    RollartError,
    WorkerDied,
    described,
    first_line,
    text_of,
)
from rollart_core.rollout import loop as sandboxes
from rollart_core.runtime.child import leave
from rollart_core.runtime.process import OnAnswer, settle
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.wire import Refused

if TYPE_CHECKING:
    from rollart_sandboxes.pool.source import SandboxSource

LINE_BYTES = 64 << 20
"""Maximum length of a line in both directions."""


class SandboxWorker:
    """A worker in a sandbox, with the interface of one in a process of the run.

    Args:
        name: Its name in errors.
        source: Source of its sandbox, in which this machine's Python and packages are readable.
    """

    def __init__(self, name: str, source: SandboxSource) -> None:
        self.name = name
        self.on_death: Callable[[SandboxWorker], None] | None = None
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._sandbox: Sandbox | None = None
        self._program: asyncio.Task[None] | None = None
        self._write: Callable[[bytes], None] | None = None
        self._rest = b""
        self._numbers = itertools.count()
        self._calls: dict[int, OnAnswer] = {}
        self._why_gone = ""
        self._closed = False

    @property
    def alive(self) -> bool:
        """True while it can be called."""
        return self._write is not None and not self._why_gone

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Acquire a sandbox, start the program in it, and create its reward function.

        Args:
            factory: Ignored: the program only creates a :class:`RewardFunction`.
            kwargs: Arguments of the reward function, as JSON.

        Raises:
            SandboxFailure: If no sandbox is available.
            WorkerDied: If the program ends immediately.
            ConfigError: If the reward cannot be created.
        """
        begun = asyncio.Event()

        def have(write: Callable[[bytes], None]) -> None:
            self._write = write
            self._loop.call_soon_threadsafe(begun.set)

        hello = wire.dumps(dict(kwargs or {}))
        self._sandbox = await sandboxes.on_loop(self._source.take(ro_binds=_readable()))
        self._program = asyncio.create_task(self._run(self._sandbox, have))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({waiting, self._program}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if why := await self.call("build", hello):
            raise ConfigError(first_line(why.decode(errors="replace")))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method with at most one body.

        Raises:
            WorkerDied: If the worker has ended, or ends meanwhile.
        """
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self.send(partial(settle, answer), method, *args)
        return await answer

    def send(self, on_answer: OnAnswer, method: str, *args: Any) -> None:
        """Send a call without waiting for it, as ``WorkerProcess.send`` does.

        Raises:
            WorkerDied: If the worker has ended.
        """
        if not self.alive or self._write is None:
            raise WorkerDied(self._why_gone or f"the {self.name} was not started")
        number = next(self._numbers)
        self._calls[number] = on_answer
        line = b"%d %b %b\n" % (number, method.encode(), *(args or (b"",)))
        sandboxes.submit(_called(self._write, line))

    def kill(self) -> None:
        """Accept no more answers; ``close`` stops the sandbox."""
        self._mark_dead(f"the {self.name} was killed")

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Stop the sandbox and the worker in it; can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._mark_dead(f"the {self.name} was closed")
        if self._sandbox is not None:
            await sandboxes.on_loop(self._source.give_back(self._sandbox))
        if self._program is not None:
            await asyncio.gather(self._program, return_exceptions=True)

    async def _run(self, sandbox: Sandbox, have: Callable[[Callable[[bytes], None]], None]) -> None:
        """Run the program until it ends."""
        argv = [sys.executable, "-m", __name__]
        ttl_s = float(self._source.options.get("ttl_s", 3600.0))
        program = sandbox.program(
            argv, take=self._took, begun=have, timeout_s=ttl_s, env=_environment()
        )
        try:
            ended = await sandboxes.on_loop(program)
        except Exception as e:
            self._mark_dead(f"the {self.name} is gone: {first_line(text_of(e))}")
            return
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        said = f": {first_line(lines[-1])}" if lines else ""
        self._mark_dead(
            f"the {self.name} is gone (exit code {ended.exit_code}, in its sandbox){said}"
        )

    def _took(self, data: bytes) -> None:
        """Split the output into lines; runs in the thread of the sandboxes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._loop.call_soon_threadsafe(self._take, line)
        if len(self._rest) > LINE_BYTES:
            self._rest = b""
            why = f"the {self.name} wrote a line of more than {LINE_BYTES} bytes"
            self._loop.call_soon_threadsafe(self._mark_dead, why)

    def _take(self, line: bytes) -> None:
        number, _, body = line.partition(b" ")
        try:
            on_answer = self._calls.pop(int(number))
        except (ValueError, KeyError):
            self._mark_dead(f"the {self.name} wrote a line that is not in the worker protocol")
            return
        on_answer(body, None)

    def _mark_dead(self, why: str) -> None:
        if self._why_gone:
            return
        self._why_gone = why
        calls, self._calls = self._calls, {}
        for on_answer in calls.values():
            on_answer(None, WorkerDied(why))
        if not self._closed and self.on_death is not None:
            self.on_death(self)


async def _called(write: Callable[[bytes], None], line: bytes) -> None:
    write(line)


def _environment() -> Mapping[str, str]:
    """Return the environment of a worker in a sandbox, without secrets of this process."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def _readable() -> list[str]:
    """Return the folders of this Python and its packages."""
    folders = [sys.prefix, sys.base_prefix, *sys.path]
    found = {str(Path(folder).resolve()) for folder in folders if folder and Path(folder).exists()}
    found |= {str(Path(folder)) for folder in (sys.prefix, sys.base_prefix)}
    system = ("/usr", "/lib", "/bin", "/sbin")
    return sorted(f for f in found if f != "/" and not f.startswith(system))


# The program in the sandbox


class _Server:
    """Answers calls, each in a separate task."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[bytes] = []
        self._function: RewardFunction | None = None

    async def serve(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: bytes) -> None:
        number, method, body = line.split(b" ", 2)
        answer = await self._called(method, body)
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._write)
        self._ready.append(number + b" " + answer + b"\n")

    async def _called(self, method: bytes, body: bytes) -> bytes:
        if self._function is None:
            return self._build(body)
        if method == b"close":
            await self._function.close()
            return b""
        try:
            return await self._function.answer(body)
        except Refused as e:
            return e.body()
        except Exception as e:
            return Refused("internal", described(e)).body()

    def _build(self, body: bytes) -> bytes:
        """Create the reward function; return the error if this fails."""
        try:
            self._function = RewardFunction(**json.loads(body))
        except Exception as e:
            why = text_of(e) if isinstance(e, RollartError) else described(e)
            return first_line(why).encode()
        return b""

    def _write(self) -> None:
        """Write all ready answers in one operation."""
        lines, self._ready = b"".join(self._ready), []
        self._out.write(lines)
        self._out.flush()


async def _serve(out: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await _Server(out).serve(reader)


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's main process handles Ctrl-C
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of a reward goes to stderr
    asyncio.run(_serve(out))
    leave()
    os._exit(0)  # a hanging reward must not keep the process alive


if __name__ == "__main__":
    main()
