"""A foreign package in a separate process, shared by the environments of one interpreter.

Takes: a Python interpreter and the path of a session module.
Gives: :class:`RemoteEnvProcess`, with the interface of
:class:`rollart_sandboxes.isolation.server.EnvSlot`.
Never: keeps a process after its last session closes. If a process dies, the pending calls fail, and
the next reset starts a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from rollart_core.errors import EnvironmentFailure, PluginError, UnknownIdError, first_line
from rollart_sandboxes.isolation import server

CLOSE_S = 5.0
"""Maximum time to close a session, and to wait for the end of a process."""


class HostProcess:
    """One process with the foreign package."""

    def __init__(self, python: str, path: str) -> None:
        """Start the process.

        Args:
            python: The interpreter, 3.8 or newer, in which the foreign package is installed.
            path: Path of the session module.

        Raises:
            PluginError: If the interpreter does not exist.
        """
        self._python = python
        self._futures: dict[int, Future[Any]] = {}
        self._ids = count()
        self._lock = threading.Lock()
        self._stderr: deque[str] = deque(maxlen=5)
        self._ended = False
        self.num_slots = 0
        self.retired = False
        """Set if a thread of the process hangs: the process keeps its sessions, but gets no new
        ones."""
        try:
            self._process = subprocess.Popen(
                [python, server.__file__, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as e:
            raise PluginError(f"python {python!r} cannot be started: {e.strerror or e}") from e
        self._threads = [
            threading.Thread(target=read, name="rollart-adapter", daemon=True)
            for read in (self._read_answers, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """False if the process has ended."""
        return self._process.poll() is None

    def new_env(self) -> int:
        """Return a session number that is unique in this process."""
        return next(self._ids)

    def submit(self, call: str, slot: int, args: tuple[object, ...]) -> Future[Any]:
        """Send a call and return a future for its answer."""
        future: Future[Any] = Future()
        key = next(self._ids)
        line = json.dumps({"id": key, "call": call, "seat": slot, "args": args}) + "\n"
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            gone = self._ended
            if not gone:
                try:
                    stdin.write(line)
                    stdin.flush()
                    self._futures[key] = future
                except (OSError, ValueError):  # the process or its stdin is closed
                    gone = True
        if gone:
            future.set_exception(self._gone())
        return future

    def close(self) -> None:
        """End the process by closing its stdin; kill it if it does not end in time."""
        stdin = self._process.stdin
        with suppress(OSError, ValueError):
            if stdin is not None:
                stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()

    def _read_answers(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            with stdout:
                for line in stdout:
                    self._settle(json.loads(line))
        except (ValueError, KeyError):
            self._stderr.append(
                "the output is not in the protocol of an adapter's process: python must be a Python"
            )
            self._process.kill()
        self._fail_all()

    def _settle(self, answer: Mapping[str, Any]) -> None:
        with self._lock:
            future = self._futures.pop(answer["id"])
        if "error" in answer:
            future.set_exception(_Raised(answer["error"]))
        else:
            future.set_result(answer["value"])

    def _read_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                if line.strip():
                    self._stderr.append(line.rstrip())

    def _fail_all(self) -> None:
        with self._lock:
            self._ended = True
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(self._gone())

    def _gone(self) -> EnvironmentFailure:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._threads[1].join(CLOSE_S)  # its last words may not be read yet
        code = self._process.poll()
        said = first_line(self._stderr[-1]) if self._stderr else "nothing on stderr"
        return EnvironmentFailure(
            f"the adapter's process ({self._python}) is gone, exit code {code}: {said}",
            detail="\n".join(self._stderr),
        )


class _Raised(Exception):
    """An exception that the other process raised."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error['types'][0]}: {error['message']}")
        self.error = error


class _Processes:
    """The host processes of this process, by interpreter and session module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, str, str], HostProcess] = {}

    def lend(self, python: str, path: str) -> HostProcess:
        """Return a live process, and count one more session."""
        key = (os.getpid(), python, path)
        with self._lock:
            process = self._by_key.get(key)
            if process is None or process.retired or not process.alive:
                process = self._by_key[key] = HostProcess(python, path)
            process.num_slots += 1
            return process

    def take_back(self, process: HostProcess, *, hung: bool = False) -> None:
        """Count one session less; end the process after its last session."""
        with self._lock:
            process.num_slots -= 1
            process.retired = process.retired or hung
            last = process.num_slots == 0
            if last or process.retired:
                self._by_key = {k: p for k, p in self._by_key.items() if p is not process}
        if last:
            process.close()


_processes = _Processes()


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments to open a session."""

    python: str
    path: str
    env_id: str
    options: Mapping[str, Any]


class RemoteEnvProcess:
    """A session in another process."""

    def __init__(self, opening: Opening) -> None:
        """Open the session.

        Raises:
            UserError: If the interpreter, the package, the id or the options are invalid.
        """
        self._process: HostProcess | None = _processes.lend(opening.python, opening.path)
        self._slot = self._process.new_env()
        self._pending: Future[Any] | None = None
        try:
            with _told_to_the_user(opening):
                self._facts = self._call("open", opening.env_id, dict(opening.options))
        except BaseException:
            self.close()
            raise

    def facts(self) -> Any:
        """Return the description of the session."""
        return self._facts

    @property
    def alive(self) -> bool:
        """False if the process has ended."""
        return self._process is not None and self._process.alive

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[Any, Any]:
        """Begin an episode."""
        observation, info = self._call("reset", seed, task)
        return observation, info

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        """Execute one action."""
        observation, reward, terminated, truncated, info = self._call("step", action)
        return observation, reward, terminated, truncated, info

    def oracle(self) -> str | None:
        """Return the next action of the expert."""
        advice: str | None = self._call("oracle")
        return advice

    def secrets(self) -> list[str]:
        """Return the texts that the agent must not read."""
        return list(self._call("secrets"))

    def close(self) -> None:
        """Close the session; the last session also ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        hung = self._pending is not None and not self._pending.done()
        if not hung and process.alive:
            try:
                process.submit("close", self._slot, ()).result(CLOSE_S)
            except TimeoutError:
                hung = True
            except Exception:  # errors while closing are ignored
                hung = False
        _processes.take_back(process, hung=hung)

    def _call(self, call: str, *args: object) -> Any:
        if self._process is None:
            raise EnvironmentFailure("the environment is closed", boundary=f"env.{call}")
        self._pending = self._process.submit(call, self._slot, args)
        try:
            return self._pending.result()
        except _Raised as e:
            if call == "open":
                raise
            trace = e.error["trace"]
            raise EnvironmentFailure(
                f"env.{call}: {e}", boundary=f"env.{call}", detail=trace
            ) from e


def describe(opening: Opening) -> dict[str, Any]:
    """Return the description of an environment, determined in a separate process.

    Raises:
        UserError: If the interpreter, the package, the id or the options are invalid.
    """
    process = _processes.lend(opening.python, opening.path)
    try:
        with _told_to_the_user(opening):
            asked = (opening.env_id, dict(opening.options))
            answer = process.submit("describe", process.new_env(), asked)
            return dict(answer.result())
    finally:
        _processes.take_back(process)


@contextmanager
def _told_to_the_user(opening: Opening) -> Iterator[None]:
    """Convert errors of a session module about ids, options and packages to a UserError."""
    try:
        yield
    except _Raised as e:
        raise user_error(e.error["types"], e.error["message"], opening) from e
    except EnvironmentFailure as e:
        raise PluginError(f"{opening.env_id}: {e}") from e


def user_error(types: list[str], message: str, opening: Opening) -> Exception:
    """Return the error for the user, selected by the names of the raised classes."""
    where = f"{opening.env_id}"
    if "ImportError" in types:
        return PluginError(f"{where}: {opening.python}: {first_line(message)}")
    if "LookupError" in types:
        return UnknownIdError(first_line(message))
    return PluginError(f"{where}: {types[0]}: {first_line(message)}")
