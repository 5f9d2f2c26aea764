"""One SGLang server process: launched, watched from outside, ended with all it has spawned.

Takes: a command line. Gives: whether it runs, and how it ended. Never: outlives the process that
launched it (on Linux the kernel sees to that), or leaves a child of its own behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rollart_core.errors import ConfigError
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import SGLangConfig

_PR_SET_PDEATHSIG = 1
_TERM_GRACE_S = 3.0
_GONE_S = 20.0
_LOOK_S = 0.02


class SGLangServer:
    """A launched server.

    Args:
        argv: Its command line.
        environment: Variables it has besides those of this process.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._argv = list(argv)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of its first process, once started; also the id of its process group."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it; its output goes where this process's goes.

        Raises:
            ConfigError: When there is no such program.
        """
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as e:
            raise ConfigError(f"engine.command: {self._argv[0]!r} cannot be started: {e}") from e

    def ended(self) -> str | None:
        """Say how it ended; None while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        """End it now, with everything it has spawned."""
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it with everything it has spawned; may be called twice."""
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _TERM_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)  # children may be left though it has ended
        await asyncio.to_thread(process.wait)
        gone_by = time.monotonic() + _GONE_S
        while group_members(process.pid) and time.monotonic() < gone_by:
            await asyncio.sleep(_LOOK_S)  # what it held is free only when the last has ended


def launch_argv(
    config: SGLangConfig, *, port: int, first_gpu: int | None, model: Mapping[str, str]
) -> list[str]:
    """Return the command line of a server.

    Args:
        config: The engine's options.
        port: Where it is to listen, on this machine only.
        first_gpu: The first of its ``tp_size`` GPUs, counted among those this process sees; None:
            it has no GPU.
        model: Flags that say which model, and how.

    Raises:
        ConfigError: When no command is given and this Python has no sglang.
    """
    command = list(config.command)
    if not command:
        if find_spec("sglang") is None:
            raise ConfigError(
                "engine: this Python has no sglang; give engine.command, such as "
                "[/opt/sglang/bin/python, -m, sglang.launch_server], or engine.url of a running one"
            )
        command = [sys.executable, "-m", "sglang.launch_server"]
    gpus = {"tp_size": config.tp_size}
    if first_gpu is not None:
        gpus["base_gpu_id"] = first_gpu
    where = {"host": "127.0.0.1", "port": port}
    options = {**gpus, **model, **config.server_args, **where}
    return command + dialect.flags(options, on_cpu=first_gpu is None)


def launch_environment(config: SGLangConfig, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables of a server; the run's own paths are not for another Python."""
    cpu = dialect.CPU_ENVIRONMENT if on_cpu else {}
    return {"PYTHONPATH": "", **dialect.ENVIRONMENT, **cpu, **config.environment}


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def group_members(group_id: int) -> list[int]:
    """Return the processes of a group that have not ended; those that nobody has reaped have."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if int(group) == group_id and state not in "ZX":
                found.append(int(file.parent.name))
    return found


def _die_with_parent() -> None:
    """Ask Linux to kill this process with its parent."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
