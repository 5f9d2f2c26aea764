"""The sandbox type ``process``: a temporary folder and a process group, without isolation.

Takes: options. Gives: the Sandbox contract, with limits per process. Never: protects the host's
files or network from code, so it refuses to start unless the option ``trusted`` is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rollart_core.errors import ConfigError
from rollart_sandboxes.base import AgentSandbox
from rollart_sandboxes.config import ProcessConfig, SandboxConfig
from rollart_sandboxes.connection import bootstrap
from rollart_sandboxes.spawn import spawn

_SANDBOX: Final = "ROLLART_BOX"
_PREFIX: Final = "rollart-box-"


class ProcessSandbox(AgentSandbox):
    """Runs commands on the host, like the run itself, in a temporary folder.

    File transfers stay within that folder. Commands can leave it.
    """

    config_class: ClassVar[type[SandboxConfig]] = ProcessConfig
    trial: ClassVar[Mapping[str, object]] = {"trusted": True}

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        assert isinstance(self._config, ProcessConfig)
        self._options = self._config
        self._name = uuid.uuid4().hex
        self._folder = Path(tempfile.gettempdir(), f"{_PREFIX}{self._name}")
        if not self._options.trusted:
            raise ConfigError(
                "the sandbox process has no isolation: set its option trusted: true if you trust "
                "the code, or use bubblewrap"
            )

    async def _launch(self) -> asyncio.subprocess.Process:
        self.leaves("folder", str(self._folder))
        self.leaves("mark", self._name)
        return await spawn([sys.executable, "-I", "-S", "-c", bootstrap()])

    def _hello(self) -> dict[str, Any]:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": self._options.num_open_files}
        if self._options.memory_bytes is not None:
            limits["RLIMIT_AS"] = self._options.memory_bytes
        keep = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            "own_root": str(self._folder),
            "confine": True,
            "limits": limits,
            "env": {**keep, **self._options.env, _SANDBOX: self._name},
        }

    async def forward_port(self, target: str) -> str:
        """Return ``target``: without isolation, programs reach what the run itself reaches."""
        return target

    @classmethod
    async def remove(cls, left: Mapping[str, Sequence[str]]) -> list[str]:
        """Kill the processes of a sandbox whose owner is gone."""
        for name in left.get("mark", ()):
            _kill_all_of(name)
        return []

    async def _gone(self) -> None:
        """Clean up on behalf of an agent that was killed."""
        _kill_all_of(self._name)
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill_all_of(name: str) -> None:
    """Kill the commands of a sandbox, which carry its name in their environment."""
    for pid in _bearing(f"{_SANDBOX}={name}".encode()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _bearing(mark: bytes) -> list[int]:
    """Return the processes that have this entry in their environment (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
