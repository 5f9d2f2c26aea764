"""One inference server process: launch it, check it, and end it with all its child processes.

Takes: a command line. Gives: whether it is running, and how it ended. Never: outlives the process
that launched it (on Linux, the kernel ensures this), or leaves a child process running.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollart_core.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_OWN_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Set for the engine's process (``engine_threads``); a server has the defaults of the machine."""
_TERM_GRACE_S = 3.0
_GONE_S = 20.0
_LOOK_S = 0.02
_PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to connections: one of those could be taken until the bind."""
_TAIL_BYTES = 64 * 2**10
_ERROR = re.compile(r"\b(?:[A-Za-z_.]*(?:Error|Exception)|error): \S.*(?:\n {2,4}\S.*)?")
_NO_CAUSE = "root cause"
"""Part of errors that only report an earlier one."""
_MAX_ERROR = 300


class ServerProcess:
    """A launched server.

    Args:
        argv: Its command line.
        environment: Environment variables in addition to those of this process, except for the
            number of threads.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._argv = list(argv)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process id of the main process after the start; also the id of its process group."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server; it inherits stdout and stderr.

        Raises:
            ConfigError: If the program does not exist.
        """
        self._log_start = _log_size()
        inherited = {k: v for k, v in os.environ.items() if k not in _OWN_THREADS}
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                env={**inherited, **self._environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as e:
            raise ConfigError(f"engine.command: {self._argv[0]!r} cannot be started: {e}") from e

    def ended(self) -> str | None:
        """Return how it ended; None while it is running."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def last_error(self) -> str:
        """Return the last error in what the server printed; "" if stdout is not a file."""
        size = _log_size()
        if size <= self._log_start:
            return ""
        with open("/proc/self/fd/1", "rb") as log:
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            found = _ERROR.findall(log.read().decode(errors="replace"))
        found = [error for error in found if _NO_CAUSE not in error]
        return " ".join(found[-1].split())[:_MAX_ERROR] if found else ""

    def kill(self) -> None:
        """Kill the server and all its child processes."""
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stop the server and all its child processes; can be called twice."""
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _TERM_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)  # children can outlive the main process
        await asyncio.to_thread(process.wait)
        gone_by = time.monotonic() + _GONE_S
        while group_members(process.pid) and time.monotonic() < gone_by:
            await asyncio.sleep(_LOOK_S)  # resources are free after the last process ends


def launcher(command: Sequence[str], package: str, start: Sequence[str]) -> list[str]:
    """Return the command that launches a server, without its flags.

    Args:
        command: The command in the config. Empty: the package in the Python of the run.
        package: The server's Python package.
        start: Arguments of ``python`` that launch it.

    Raises:
        ConfigError: If no command is set and this Python does not have the package.
    """
    if command:
        return list(command)
    if find_spec(package) is None:
        raise ConfigError(
            f"engine: this Python has no {package}. Set engine.command, such as "
            f"[/opt/{package}/bin/python, {', '.join(start)}], or engine.url of a running server"
        )
    return [sys.executable, *start]


def command_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as flags: True is a flag without a value, False and None are left out."""
    found: list[str] = []
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            found.append(flag)
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        elif value is not False and value is not None:
            found += [flag, str(value)]
    return found


def free_port() -> int:
    """Return a port of this machine that is free, and that no connection can take."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port


def _log_size() -> int:
    """Return the size of the file that is this process's stdout; 0 if it is not a file."""
    with contextlib.suppress(OSError):
        found = os.fstat(1)
        if stat.S_ISREG(found.st_mode) and Path("/proc/self/fd/1").exists():
            return found.st_size
    return 0


def group_members(group_id: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if int(group) == group_id and state not in "ZX":
                found.append(int(file.parent.name))
    return found


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
