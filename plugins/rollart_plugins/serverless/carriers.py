"""What a worker of the pool runs in: a plain process, or a box.

Takes: bytes for the worker's stdin. Gives: lines of its stdout, and the news that it is gone.
Never: leaves a process or a box behind once closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import first_line
from rollart_core.rollout import loop as boxes
from rollart_plugins.serverless.worker import LINE_BYTES
from rollart_sandboxes.pool.source import SandboxSource

PROGRAM = "rollart_plugins.serverless.worker"
_END_S = 3.0
"""How long a worker may take to end by itself: it may have boxes to close."""
_READ_S = 1.0


class Carrier(ABC):
    """Carries one worker.

    Args:
        take: Gets each line that it writes.
        gone: Gets, once, why it is no more.
    """

    def __init__(self, take: Callable[[bytes], None], gone: Callable[[str], None]) -> None:
        self.take, self.gone = take, gone

    @abstractmethod
    async def start(self) -> None:
        """Start the program."""

    @abstractmethod
    def write(self, line: bytes) -> None:
        """Write to its stdin."""

    @abstractmethod
    async def close(self, *, kill: bool = False) -> None:
        """End it, at once or by the end of its stdin; may be called twice."""


class ProcessCarrier(Carrier):
    """A process of this machine, without a wall."""

    def __init__(self, take: Callable[[bytes], None], gone: Callable[[str], None]) -> None:
        super().__init__(take, gone)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stderr: deque[str] = deque(maxlen=5)

    async def start(self) -> None:
        """Start the program."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=_environment(),
            start_new_session=True,
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    def write(self, line: bytes) -> None:
        """Write to its stdin."""
        stdin = self._process.stdin if self._process else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(line)

    async def close(self, *, kill: bool = False) -> None:
        """End it; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if not kill:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        _kill(process)  # with all that the reward has started and left
        await process.wait()
        await asyncio.wait(self._tasks, timeout=_READ_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        why = ""
        try:
            while line := await process.stdout.readline():
                self.take(line)
        except ValueError:
            why = f"it wrote a line of more than {LINE_BYTES} bytes"
            _kill(process)
        code = await process.wait()
        said = f": {first_line(self._stderr[-1])}" if self._stderr else ""
        self.gone(why or f"exit code {code}{said}")

    async def _read_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            async for line in self._process.stderr:
                if text := line.decode(errors="replace").strip():
                    self._stderr.append(text)


class SandboxCarrier(Carrier):
    """A box of a sandbox plugin, in which this machine's Python and packages can be read."""

    def __init__(
        self,
        take: Callable[[bytes], None],
        gone: Callable[[str], None],
        source: SandboxSource,
    ) -> None:
        super().__init__(take, gone)
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._box: Sandbox | None = None
        self._program: asyncio.Task[None] | None = None
        self._write: Callable[[bytes], None] | None = None
        self._rest = b""
        self._closed = False

    async def start(self) -> None:
        """Take a box and start the program in it.

        Raises:
            SandboxFailure: When there is none.
        """
        begun = asyncio.Event()

        def have(write: Callable[[bytes], None]) -> None:
            self._write = write
            self._loop.call_soon_threadsafe(begun.set)

        self._box = await boxes.on_loop(self._source.take(ro_binds=_readable()))
        self._program = asyncio.create_task(self._run(self._box, have))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({waiting, self._program}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def write(self, line: bytes) -> None:
        """Write to its stdin."""
        if self._write is not None and not self._closed:
            boxes.submit(_called(self._write, line))

    async def close(self, *, kill: bool = False) -> None:
        """Take the box down, and the worker with it; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._box is not None:
            await boxes.on_loop(self._source.give_back(self._box))
        if self._program is not None:
            await asyncio.gather(self._program, return_exceptions=True)

    async def _run(self, box: Sandbox, have: Callable[[Callable[[bytes], None]], None]) -> None:
        argv = [sys.executable, "-m", PROGRAM, "0"]
        ttl_s = float(self._source.options.get("ttl_s", 3600.0))
        try:
            ended = await boxes.on_loop(
                box.program(
                    argv, take=self._took, begun=have, timeout_s=ttl_s, env=_sandbox_environment()
                )
            )
        except Exception as e:
            self.gone(first_line(str(e)))
            return
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        said = f": {first_line(lines[-1])}" if lines else ""
        self.gone(f"exit code {ended.exit_code} in its box{said}")

    def _took(self, data: bytes) -> None:
        """Cut lines; in the boxes' thread."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._loop.call_soon_threadsafe(self.take, line + b"\n")


async def _called(write: Callable[[bytes], None], line: bytes) -> None:
    write(line)


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a worker and its children: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment() -> Mapping[str, str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def _sandbox_environment() -> Mapping[str, str]:
    """Return what a worker in a box is told: nothing of this process's own secrets."""
    kept = _environment()
    return {k: kept[k] for k in ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONUTF8")}


def _readable() -> list[str]:
    """Return the folders of this Python and of what it imports."""
    folders = [sys.prefix, sys.base_prefix, *sys.path]
    found = {str(Path(folder).resolve()) for folder in folders if folder and Path(folder).exists()}
    found |= {str(Path(folder)) for folder in (sys.prefix, sys.base_prefix)}
    system = ("/usr", "/lib", "/bin", "/sbin")
    return sorted(f for f in found if f != "/" and not f.startswith(system))


def new_source(sandbox: Any) -> SandboxSource:
    """Return where boxes of this kind come from."""
    from rollart_sandboxes.pool.source import sandbox_source

    return sandbox_source(sandbox)
