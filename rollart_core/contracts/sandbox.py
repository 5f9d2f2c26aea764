"""Sandboxes: walls around code that somebody else, or the model, wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec(PluginSpec):
    """What a sandbox says of itself."""

    isolation: str = "none"
    """How strong the wall is: ``container``, ``namespace`` or ``none``."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command in the box gave."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """True when output was cut at the cap."""
    wall_s: float = 0.0


class Sandbox(ABC):
    """One box.

    ``start -> (exec | read_file | write_file | snapshot | restore | forward)* -> close``.
    """

    @abstractmethod
    async def start(self) -> None:
        """Bring the box up."""

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command; when the time is over its whole process group is killed."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return a file of the box."""

    @abstractmethod
    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file in the box, making its folders."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Keep the writable tree and return its name."""

    @abstractmethod
    async def restore(self, snapshot: str) -> None:
        """Bring the writable tree back to a snapshot."""

    @abstractmethod
    async def forward(self, path: str, target: str) -> None:
        """Make a unix socket at ``path`` in the box that leads to ``target`` (host:port)."""

    @abstractmethod
    async def close(self) -> None:
        """Take the box down; may be called twice."""
