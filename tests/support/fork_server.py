"""A process that has imported torch, transformers and the trainer, and forks others from itself.

Importing them takes a process 4 seconds of CPU time, and a run has several processes. In tests
they are forked from one server instead. ``install`` replaces the function of the product that
starts the process of a part; ``start_program`` starts a program, such as ``rollart run``, whose
parts are forked as well.

A forked process is as a new one: it has the environment, the working directory, the module path
and the standard streams that its client asks for, and no other file of the server. It differs in
three ways: hashes of strings are seeded as in the server, numpy's own linear algebra has one
thread, and its parent is the server. It is killed when its client or the server is gone.

The server has one thread and has executed no torch operation when it forks; it refuses to fork
otherwise. Tests marked ``starts_normally`` start processes as a run outside of tests does, and so
do all tests with ``ROLLART_TEST_STARTS_NORMALLY=1``, and where Linux has no process descriptors.

This file is also the program of the server: it imports nothing of pytest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

OFF: Final = "ROLLART_TEST_STARTS_NORMALLY"
SEAM: Final = "rollart_core.runtime.process"
PART: Final = "rollart_core.runtime.child"
CLI: Final = "rollart_core.cli:main"
PRELOADED: Final = (
    PART,
    "rollart_core.cli.app",
    "rollart_core.models.new",
    "rollart_core.runtime.inline",
    "rollart_core.runtime.launch",
    "rollart_core.runtime.factories",
    "rollart_testing",
    "rollart_core.training.process_group",
    "rollart_core.training.trainer",
    "rollart_algorithms.plugin",
    "rollart_algorithms.ppo",
    "rollart_envs.plugin",
    "rollart_plugins.engines.embedded",
    "rollart_plugins.plugin",
    "rollart_plugins.weights.collective",
    "rollart_plugins.weights.delta",
    "rollart_plugins.weights.disk",
    "rollart_plugins.weights.shared_memory",
    "rollart_rewards.plugin",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
)
THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LENGTH, _STATUS = struct.Struct("=I"), struct.Struct("=i")
_MOST_FDS: Final = 8


@dataclass(frozen=True)
class Request:
    """What a client asks for; the descriptors of stdout, stderr and ``fd`` come with it."""

    target: str
    """``PART``, or the ``"module:function"`` of a program."""
    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    parts_are_forked: bool = True
    """Whether the parts that a program starts are forked too."""
    own_group: bool = False
    """Whether it leads a process group of its own."""


def send_message(connection: socket.socket, content: Mapping[str, Any], *fds: int) -> None:
    """Send plain data and file descriptors."""
    text = json.dumps(content).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(text))], fds)
    connection.sendall(text)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what the other end has sent.

    Raises:
        EOFError: If the other end is gone.
    """
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FDS, flags)
    size = _LENGTH.unpack(head)[0] if head else 1
    with connection.makefile("rb") as file:
        text = file.read(size)
    if len(text) < size:
        for fd in fds:
            os.close(fd)
        raise EOFError("the other end is gone")
    return json.loads(text), list(fds)


# The server


@dataclass(frozen=True)
class Job:
    """What a forked process does."""

    request: Request
    server_pid: int
    server_path: str
    fds: Sequence[int]

    def run(self) -> None:
        """Become as a new process, and do it."""
        from rollart_core.runtime.child import die_with_parent

        die_with_parent(self.server_pid)  # a server that is killed kills nothing itself
        self._become_new()
        if self.request.target == PART:
            from rollart_core.runtime.child import main

            main(self.fds[2], self.server_pid)
        if self.request.parts_are_forked:
            _patch(Client(self.server_path).spawn_part)
        module, _, function = self.request.target.partition(":")
        getattr(importlib.import_module(module), function)()

    def _become_new(self) -> None:
        request = self.request
        if request.own_group:
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for given, standard in zip((null, *self.fds[:2]), (0, 1, 2), strict=True):
            os.dup2(given, standard)
            os.close(given)
        os.chdir(request.cwd)
        own = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
        os.environ.clear()
        os.environ.update(request.environment)
        added = [p for p in request.environment.get("PYTHONPATH", "").split(os.pathsep) if p]
        rest = [p for p in sys.path if p not in own]
        sys.path[:] = dict.fromkeys([request.cwd, *added, *rest])
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        sys.argv = list(request.argv)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            num_cpus = len(os.sched_getaffinity(0))
            num_threads = int(request.environment.get("OMP_NUM_THREADS") or num_cpus)
            sys.modules["torch"].set_num_threads(num_threads)
            sys.modules["torch"].default_generator.seed()


@dataclass(frozen=True)
class _Child:
    """A forked process: its client waits on ``connection`` for how it ends."""

    pid: int
    pidfd: int
    connection: socket.socket


class Server:
    """Forks a process for each connection; kills it when the connection ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.PollSelector()
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}  # by pidfd
        self._by_connection: dict[int, _Child] = {}

    def serve(self) -> Job | None:
        """Fork what is asked for until stdin ends; return what to do in a forked process."""
        for fd in (0, self._listener.fileno()):
            self._selector.register(fd, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in self._selector.select()]
            self._kill_without_client()
            if 0 in ready:
                return None
            for fd in ready:
                if fd in self._children:
                    self._end(self._children[fd])
                elif fd == self._listener.fileno() and (job := self._accept()):
                    return job

    def close(self) -> None:
        """Kill what is left."""
        for child in list(self._children.values()):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._end(child)

    def _kill_without_client(self) -> None:
        """Kill the processes of clients that are gone, before anybody is told how another ended."""
        for key, _ in self._selector.select(0):
            if child := self._by_connection.pop(key.fd, None):
                self._selector.unregister(child.connection)
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _end(self, child: _Child) -> None:
        """Reap a process that has ended, and tell its client."""
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        del self._children[child.pidfd]
        os.close(child.pidfd)
        if self._by_connection.pop(child.connection.fileno(), None):
            self._selector.unregister(child.connection)
        with contextlib.suppress(OSError):  # the client may be gone
            child.connection.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
        child.connection.close()

    def _accept(self) -> Job | None:
        connection, _ = self._listener.accept()
        try:
            content, fds = receive_message(connection)
        except (OSError, EOFError) as e:  # the client was killed meanwhile
            print(f"a request that cannot be read: {e}", file=sys.stderr, flush=True)
            connection.close()
            return None
        num_threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))
        if num_threads > 1:
            send_message(connection, {"error": f"the fork server has {num_threads} threads"})
            connection.close()
            pid = -1
        else:
            pid = os.fork()
        if pid == 0:
            self._forget(connection)
            path = self._listener.getsockname()
            self._listener.close()
            return Job(Request(**content), self._pid, path, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            child = _Child(pid, os.pidfd_open(pid), connection)
            self._children[child.pidfd] = self._by_connection[connection.fileno()] = child
            self._selector.register(child.pidfd, selectors.EVENT_READ)
            self._selector.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # gone: its connection says so
                send_message(connection, {"pid": pid}, child.pidfd)
        return None

    def _forget(self, connection: socket.socket) -> None:
        """In a forked process: close what is the server's."""
        connection.close()
        for child in self._children.values():
            child.connection.close()
            os.close(child.pidfd)
        self._children, self._by_connection = {}, {}


def _preload() -> None:
    """Import what the processes of runs import, as far as it is installed."""
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            if (e.name or "").startswith("rollart_core"):
                raise
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all of it


def _main(listener_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest ends first, and this process with it
    before = set(os.listdir("/proc/self/fd"))
    _preload()
    if opened := set(os.listdir("/proc/self/fd")) - before:
        raise RuntimeError(f"imports left files open, which forked processes would share: {opened}")
    del sys.path[0]  # the folder of this file
    server = Server(socket.socket(fileno=listener_fd))
    job = server.serve()
    if job is None:
        server.close()
    else:
        del server
        job.run()


# Its clients


class Forked:
    """A process that the server has forked; has what :class:`subprocess.Popen` has."""

    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __init__(self, pid: int, pidfd: int, status_fd: int) -> None:
        """Get the process, and where its exit code will be read."""
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._status_fd = pidfd, status_fd
        self._waiting, self._signalling = threading.Lock(), threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        self._look(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: If it runs for longer than ``timeout`` seconds.
        """
        self._look(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def _look(self, timeout_s: float | None) -> None:
        if not self._waiting.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return  # another thread waits for it
        try:
            if self.returncode is None and _readable(self._status_fd, timeout_s):
                read = os.read(self._status_fd, _STATUS.size)
                # Without a status the server has ended, and the kernel has killed what it forked.
                self.returncode = _STATUS.unpack(read)[0] if read else -signal.SIGKILL
                self._close()
        finally:
            self._waiting.release()

    def _close(self) -> None:
        with self._signalling:
            os.close(self._pidfd)
            os.close(self._status_fd)
            self._pidfd = -1

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with self._signalling, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def communicate(self) -> tuple[str, str]:
        """Wait for its end and return what it wrote to pipes."""
        said: dict[IO[str], str] = {}
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None]
        readers = [
            threading.Thread(target=lambda pipe=pipe: said.update({pipe: pipe.read()}))
            for pipe in pipes
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self.wait()
        for pipe in pipes:
            pipe.close()
        out, err = (said.get(pipe, "") if pipe else "" for pipe in (self.stdout, self.stderr))
        return out, err

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def __del__(self) -> None:
        if self.returncode is None:
            what = f"process {self.pid} is still running"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)
            self._close()  # the server kills it


def _readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


@dataclass(frozen=True)
class Client:
    """Asks the server at ``path`` for processes."""

    path: str

    def fork(self, request: Request, *fds: int) -> Forked:
        """Return a new process.

        Args:
            request: What it does.
            fds: Its stdout, its stderr, and what else it needs.

        Raises:
            RuntimeError: If the server is gone or refuses.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self.path)
                send_message(connection, asdict(request), *fds)
                answer, received = receive_message(connection)
            except (OSError, EOFError) as e:
                log = Path(self.path).with_name("log").read_text()
                raise RuntimeError(f"the fork server is gone: {e}\n{log}") from e
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return Forked(answer["pid"], received[0], connection.detach())

    def spawn_part(
        self, fd: int, log: Any, environment: Mapping[str, str], own_group: bool
    ) -> Forked:
        """Start the process of a part, as ``_spawn`` of the product does."""
        argv = [importlib.util.find_spec(PART).origin, str(fd), str(os.getpid())]
        request = Request(PART, argv, dict(environment), os.getcwd(), own_group=own_group)
        stdout, stderr = (log.fileno(), log.fileno()) if log else (1, 2)
        return self.fork(request, stdout, stderr, fd)


class _Starter:
    """Starts the server when it is first needed."""

    def __init__(self) -> None:
        # As before any test: the one that needs the server first may have changed them.
        self._environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
        self._cwd, self._temporary = os.getcwd(), tempfile.gettempdir()
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> Client:
        """Return a client of the server."""
        with self._lock:
            if self._folder is None:
                self._folder = self._start()
        return Client(str(self._folder / "socket"))

    def _start(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="rollart-fork-", dir=self._temporary))
        with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("wb") as log:
            listener.bind(str(folder / "socket"))
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end ends the server
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                env=self._environment,
                cwd=self._cwd,
            )
        return folder

    def spawn_part(
        self, fd: int, log: Any, environment: Mapping[str, str], own_group: bool
    ) -> Forked:
        """Fork a part."""
        return self.client().spawn_part(fd, log, environment, own_group)

    @property
    def pid(self) -> int:
        """The server's process id, once it is started."""
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """End the server and all that it forked.

        Raises:
            RuntimeError: If it did not end in order.
        """
        if self._process is None or self._folder is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        code, log = self._process.wait(), (self._folder / "log").read_text()
        shutil.rmtree(self._folder)
        self._process = self._folder = None
        if code != 0:
            raise RuntimeError(f"the fork server ended with exit code {code}\n{log}")


Program = Forked | subprocess.Popen[str]
_starter: _Starter | None = None
_original: Any = None


def possible() -> bool:
    """Say whether processes can be forked here, and are to be."""
    if os.environ.get(OFF) or sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def install() -> None:
    """From now on, fork the processes of parts. The server starts with the first of them."""
    global _starter, _original
    if possible() and _starter is None:
        _starter = _Starter()
        _original = _patch(_starter.spawn_part)


def uninstall() -> None:
    """End the server, and start processes as before."""
    global _starter
    if _starter is not None:
        _patch(_original)
        _starter.close()
        _starter = None


@contextlib.contextmanager
def normally() -> Iterator[None]:
    """Start the processes of parts, and programs, as outside of tests."""
    global _starter
    if _starter is None:
        yield
        return
    kept, _starter = _starter, None
    _patch(_original)
    try:
        yield
    finally:
        _starter = kept
        _patch(_starter.spawn_part)


def _patch(spawn: Any) -> Any:
    """Replace how the processes of parts are started; return how they were."""
    module = importlib.import_module(SEAM)
    before = module._spawn
    module._spawn = spawn
    return before


def start_program(
    *argv: str,
    target: str = CLI,
    cwd: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
) -> Program:
    """Start a program, such as ``rollart run``, in a process of its own.

    Args:
        argv: Its arguments.
        target: The ``"module:function"`` that it calls.
        cwd: Its working directory; None: that of this process.
        environment: All its variables; None: those of this process.
        stdout: A file, or a pipe that the result holds the other end of.
        stderr: The same.
    """
    module, _, function = target.partition(":")
    if _starter is None:
        code = f"from {module} import {function}; {function}()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            stdout=stdout,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env=environment,
        )
    with contextlib.ExitStack() as stack:
        ours: list[IO[str] | None] = []
        theirs: list[int] = []
        for stream in (stdout, stderr):
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                ours.append(os.fdopen(reading))
                stack.callback(os.close, writing)
                theirs.append(writing)
            else:
                ours.append(None)
                theirs.append(stream if isinstance(stream, int) else stream.fileno())
        request = Request(
            target,
            ["-c", *argv],
            dict(os.environ if environment is None else environment),
            os.path.abspath(cwd or os.getcwd()),
        )
        try:
            process = _starter.client().fork(request, *theirs)
        except RuntimeError:
            for pipe in ours:
                if pipe is not None:
                    pipe.close()
            raise
        process.stdout, process.stderr = ours
        return process


def in_forked_process(function: str, argument: Mapping[str, object]) -> dict[str, Any]:
    """Do what ``rollart_bench.sides.in_fresh_process`` does, in a forked process.

    Args:
        function: ``"module:function"``; it takes one mapping and returns one, both plain JSON.
        argument: What it is given.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)  # threads are the function's own business
    target = "support.fork_server:call_side"
    process = start_program(function, json.dumps(argument), target=target, environment=environment)
    out, err = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{function} failed: {err}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def call_side() -> None:
    """Be the program of one side of a benchmark."""
    from rollart_bench import sides

    sides._main(*sys.argv[1:])


if __name__ == "__main__":
    _main(int(sys.argv[1]))
