"""A worker in its own process: starting it, calling it, watching it and stopping it.

The engines, trainer ranks and env workers of a run, the workers of the reward backend `pool` and
the comparison of mathematical answers run in such processes.

Takes: ``"module:Class"`` and picklable arguments. Gives: ``await worker.call("method", ...)``.
Never: leaves the process behind. It ends at ``close``, at ``kill``, or with the run's process. The
processes that it started end at ``close`` too, even in other sessions.
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
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.runtime.frames import Answer, Call, FrameProtocol, encode

PART_VARIABLE: Final = "ROLLART_PART"
"""Marks a worker's process and its descendants; contains the worker's name and a unique id."""
KILL_PASSES: Final = 100
KILL_WAIT_S: Final = 0.02
"""Seconds between two passes."""
EXIT_WAIT_S: Final = 2.0
"""Maximum seconds from the end of a process's stream until its exit code can be read."""
EXIT_POLL_S: Final = 0.005
OUTPUT_BYTES: Final = 4096
"""Number of bytes kept from the end of the output."""
_PIPE_BYTES: Final = 1 << 16

OnAnswer: TypeAlias = Callable[[Any, BaseException | None], None]
"""Receives the return value of a call, or its error."""


class WorkerProcess:
    """One worker in its own process."""

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
        """Describe the process; ``start`` starts it.

        Args:
            name: The name used in errors and the log.
            log_path: The file for its stdout and stderr; None: those of this process.
            keep_output: Whether to keep the end of its output for error messages instead.
            own_group: Whether it leads a process group, which is killed after it has ended. This
                also ends descendants that replaced their environment variables.
            num_threads: Number of CPU threads of its numeric libraries.
            environment: Environment variables to add to those of this process.
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
        """The process id; None before ``start``."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """True while the worker accepts calls."""
        return self._stream is not None and not self._stream.transport.is_closing()

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the process and build the object in it."""
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
        """Call a method of the object (or ``"module:function"``) and wait for the result.

        Raises:
            WorkerDied: If the process has ended, before the call or during it.
            Exception: Any exception that the method raised.
        """
        if not self.alive:
            await self._wait_exit()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(partial(settle, answer), method, *args, **kwargs)
        return await answer

    def send(self, on_answer: OnAnswer, method: str, *args: Any, **kwargs: Any) -> None:
        """Send a call without waiting for its result.

        Args:
            on_answer: Called once, on the loop, with the return value or the error; the error is
                WorkerDied if the process ends first.
            method: As for :meth:`call`.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerDied: If the process has ended.
        """
        if not self.alive or self._stream is None:
            raise self._died()
        call_id = next(self._ids)
        frame = encode(Call(call_id, method, args, kwargs))
        self._calls[call_id] = on_answer
        self._stream.transport.write(frame)

    def kill(self) -> None:
        """Kill the process now."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Let the process end, and kill it if it does not end within ``grace_s`` seconds."""
        self._closing = True
        if self._stream is not None:
            self._stream.transport.close()
        await cancel_and_wait(self._ending)
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
        on_answer = self._calls.pop(answer.call_id, None)  # None: already marked dead
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
        """Return an error that describes how the process ended."""
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
    """Set the result or error of a future, unless it is already done (its caller cancelled)."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class _Output:
    """Keeps the end of the output of a process."""

    def __init__(self) -> None:
        self._end = b""
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop

    def open(self) -> BinaryIO:
        """Return the file that the process writes to."""
        self._fd, writing = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        return os.fdopen(writing, "wb")

    def last_line(self) -> str:
        """Return the last non-empty line; an empty string if there is none."""
        self._read()
        lines = self._end.decode(errors="replace").strip().splitlines()
        return first_line(lines[-1]) if lines else ""

    def close(self) -> None:
        """Stop reading; may be called twice."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> None:
        """Read the available bytes, at most one full pipe buffer."""
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
    """Kill the processes that inherited the mark of an ended process.

    Processes that replaced their environment variables are not found. Works only on Linux.
    """
    text = f"{PART_VARIABLE}={mark}".encode()
    for _ in range(KILL_PASSES):  # a process may start another one before it is killed
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
    """Return the initial variables of a process; empty if it ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _spawn(
    fd: int, log: BinaryIO | None, environment: Mapping[str, str], own_group: bool
) -> subprocess.Popen[bytes]:
    """Start the program of a worker.

    Args:
        fd: The socket that calls arrive on.
        log: The file for its stdout and stderr; None: those of this process.
        environment: All its environment variables.
        own_group: Whether it leads a new process group.
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
