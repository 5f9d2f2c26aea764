"""A worker in a process of its own: started, called, watched and ended.

Engines, trainer ranks and environments of a run, workers of the reward backend `pool`, and what
compares mathematics are such processes.

Takes: ``"module:Class"`` and arguments that pickle. Gives: ``await part.call("method", ...)``.
Never: leaves the process behind; it ends with ``close``, with the run's process, or when told. What
it has started ends with ``close`` too, also in sessions of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from rollart_core.errors import WorkerDied, first_line
from rollart_core.runtime.frames import Answer, Call, FrameProtocol, encode

PART_VARIABLE: Final = "ROLLART_PART"
"""Marks a worker's process and all that it starts: the name of the worker, and a unique id."""
KILL_PASSES: Final = 100
KILL_WAIT_S: Final = 0.02
"""Between two passes."""
EXIT_WAIT_S: Final = 2.0
"""How long after the end of its stream a process may take until its exit code can be read."""
EXIT_POLL_S: Final = 0.005
OUTPUT_BYTES: Final = 4096
"""How much of its output is kept."""
_PIPE_BYTES: Final = 1 << 16

OnAnswer: TypeAlias = Callable[[Any, BaseException | None], None]
"""Gets what a call returned, or its error."""


class WorkerProcess:
    """One part of the run in a process of its own."""

    def __init__(
        self,
        name: str,
        *,
        log_path: Path | None = None,
        keep_output: bool = False,
        own_group: bool = False,
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the process; ``start`` brings it up.

        Args:
            name: What errors and the log call it.
            log_path: Where its stdout and stderr go; None: to those of this process.
            keep_output: Whether to keep the end of what it writes, for errors, instead.
            own_group: Whether it leads a process group, which is killed when it has ended: what it
                has started with an environment of its own, too.
            num_threads: CPU threads of numeric libraries in it.
            environment: Variables it has besides those of this process.
        """
        self.name = name
        self.on_death: Callable[[WorkerProcess], None] | None = None
        self._log_path = log_path
        self._output = _Output() if keep_output else None
        self._own_group = own_group
        self._num_threads = num_threads
        self._mark = f"{name} {uuid.uuid4().hex}"
        self._more = {**(environment or {}), PART_VARIABLE: self._mark}
        self._calls: dict[int, OnAnswer] = {}
        self._ids = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: FrameProtocol | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """True while it can be called."""
        return self._stream is not None and not self._stream.transport.is_closing()

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Bring the process up and build the part in it."""
        ours, theirs = socket.socketpair()
        try:
            with self._open_log() as log:
                self._process = _spawn(theirs.fileno(), log, self._environment(), self._own_group)
        finally:
            theirs.close()
        _, self._stream = await asyncio.get_running_loop().create_connection(
            lambda: FrameProtocol(self._take, self._ended), sock=ours
        )
        if factory is not None:
            await self.call("__build__", factory, dict(kwargs or {}))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the part (or ``"module:function"``) and wait for its answer.

        Raises:
            WorkerDied: When the process is gone, before or meanwhile.
            Exception: Whatever the method raised.
        """
        if not self.alive:
            await self._wait_exit()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(partial(settle, answer), method, *args, **kwargs)
        return await answer

    def send(self, on_answer: OnAnswer, method: str, *args: Any, **kwargs: Any) -> None:
        """Make a call that nobody need wait for.

        Args:
            on_answer: Called once, on the loop, with what it returned or raised: WorkerDied when
                the process ends meanwhile.
            method: As for :meth:`call`.
            *args: Its arguments.
            **kwargs: The same.

        Raises:
            WorkerDied: When the process is gone.
        """
        if not self.alive or self._stream is None:
            raise self._died()
        call_id = next(self._ids)
        frame = encode(Call(call_id, method, args, kwargs))
        self._calls[call_id] = on_answer
        self._stream.transport.write(frame)

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Let the process end by itself, and kill it when it does not within ``grace_s``."""
        self._closing = True
        if self._stream is not None:
            self._stream.transport.close()
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
        self._mark_dead()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, grace_s)
            except subprocess.TimeoutExpired:
                self.kill()
                await asyncio.to_thread(self._process.wait)
            if self._own_group:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(_kill_marked, self._mark)
        if self._output is not None:
            self._output.close()

    def _take(self, answer: Call | Answer) -> None:
        assert isinstance(answer, Answer)
        on_answer = self._calls.pop(answer.call_id, None)  # None: it was marked dead meanwhile
        if on_answer is not None:
            on_answer(answer.value, answer.error)

    def _ended(self) -> None:
        if not self._closing:
            self._ending = asyncio.create_task(self._die(), name=f"end of {self.name}")

    async def _die(self) -> None:
        await self._wait_exit()
        self._mark_dead()

    async def _wait_exit(self) -> None:
        """Wait until the exit code of a process whose stream has ended can be read."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + EXIT_WAIT_S
        while self._process and self._process.poll() is None and loop.time() < until_s:
            await asyncio.sleep(EXIT_POLL_S)

    def _mark_dead(self) -> None:
        calls, self._calls = self._calls, {}
        for on_answer in calls.values():
            on_answer(None, self._died())
        if not self._closing and self.on_death is not None:
            self.on_death(self)

    def _died(self) -> WorkerDied:
        """Return the error that says how the process ended."""
        code = self._process.poll() if self._process else None
        how = "closed" if code is None and self._closing else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        where = f"; see {self._log_path}" if self._log_path else ""
        if self._output is not None and (said := self._output.last_line()):
            where = f": {said}"
        died = WorkerDied(f"the {self.name} process is gone ({how}){where}")
        died.exit_code = code
        return died

    @contextlib.contextmanager
    def _open_log(self) -> Iterator[BinaryIO | None]:
        if self._output is not None:
            with self._output.open() as log:
                yield log
        elif self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                yield log
        else:
            yield None

    def _environment(self) -> dict[str, str]:
        threads = str(self._num_threads)
        path = os.pathsep.join(p for p in sys.path if p)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": path,
            **self._more,
        }


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Pass an answer on, unless its caller has been cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class _Output:
    """The end of what a process writes."""

    def __init__(self) -> None:
        self._end = b""
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop

    def open(self) -> BinaryIO:
        """Return the file that the process is to write to."""
        self._fd, writing = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        return os.fdopen(writing, "wb")

    def last_line(self) -> str:
        """Return the last line that is not empty; empty if there is none."""
        self._read()
        lines = self._end.decode(errors="replace").strip().splitlines()
        return first_line(lines[-1]) if lines else ""

    def close(self) -> None:
        """Read no more; may be called twice."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> None:
        """Read what a pipe holds at once."""
        if self._fd is None:
            return
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        self._end = (self._end + data)[-OUTPUT_BYTES:]
        if not data:
            self.close()


def _kill_marked(mark: str) -> None:
    """Kill what a process that has ended left behind: processes that inherited its mark.

    A process that replaces its environment is not found. Elsewhere than on Linux none is.
    """
    text = f"{PART_VARIABLE}={mark}".encode()
    for _ in range(KILL_PASSES):  # what is killed may be about to start another
        found = [pid for pid in _all_pids() if text in _environment_of(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(KILL_WAIT_S)


def _all_pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _environment_of(pid: int) -> list[bytes]:
    """Return the variables a process began with; none of one that ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _spawn(
    fd: int, log: BinaryIO | None, environment: Mapping[str, str], own_group: bool
) -> subprocess.Popen[bytes]:
    """Start the program of a part.

    Args:
        fd: The socket on which it is called.
        log: Where its stdout and stderr go; None: to those of this process.
        environment: All its variables.
        own_group: Whether it leads a process group of its own.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "rollart_core.runtime.child", str(fd), str(os.getpid())],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        process_group=0 if own_group else None,
    )
