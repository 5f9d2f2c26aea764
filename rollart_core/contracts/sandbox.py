"""Sandboxes: isolation for code from other people or from the model.

Takes: nothing. Gives: the base class of sandboxes, their spec, the result of a command. Never:
describes the strength of the isolation; the spec and ``docs/guides/sandboxes.md`` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rollart_core.contracts.host import Finding, LedgerLine
from rollart_core.contracts.spec import PluginSpec

RUN_VARIABLE: Final = "ROLLART_RUN"
"""Environment variable of a run's processes with the name of the run. Sandboxes belong to that
run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec(PluginSpec):
    """The spec of a sandbox."""

    isolation: str = "none"
    """Strength of the isolation: ``container``, ``namespace`` or ``none``."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command in the sandbox."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """True if the command was killed because of its time limit."""
    truncated: bool = False
    """True if output was cut at the limit."""
    wall_s: float = 0.0
    """Duration of the command, in seconds."""
    stdout_cut: int | None = None
    """Number of bytes of ``stdout`` before the cut. None if nothing was cut."""
    stderr_cut: int | None = None
    """Number of bytes of ``stderr`` before the cut. None if nothing was cut."""


class Sandbox(ABC):
    """Base class of sandboxes.

    The lifecycle is ``start -> (exec | program | read_file | write_file | snapshot | restore |
    forward | forward_port)* -> close``.
    """

    line: LedgerLine | None = None
    """The sandbox's line in the ledger, set before the start. None if it is not in a ledger."""
    trial: ClassVar[Mapping[str, object]] = {}
    """Options of a test sandbox that only shows whether sandboxes start on this machine."""

    @abstractmethod
    async def start(self) -> None:
        """Start the sandbox."""

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
        """Run a command. At the time limit, its whole process group is killed."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the sandbox."""

    @abstractmethod
    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file in the sandbox. Create its parent folders."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Store a snapshot of the writable tree and return its name."""

    @abstractmethod
    async def restore(self, snapshot: str) -> None:
        """Restore the writable tree from a snapshot."""

    @abstractmethod
    async def forward(self, path: str, target: str) -> None:
        """Create a unix socket at ``path`` in the sandbox, forwarded to ``target`` (host:port)."""

    async def forward_port(self, target: str) -> str:
        """Return the ``host:port`` at which programs in the sandbox reach ``target`` (optional).

        Args:
            target: ``host:port`` that this process can reach.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot forward ports out of the sandbox")

    async def program(
        self,
        argv: Sequence[str],
        *,
        take: Callable[[bytes], None],
        begun: Callable[[Callable[[bytes], None]], None],
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a program until it ends and communicate over its stdin and stdout (optional).

        Args:
            argv: The program and its arguments.
            take: Called with each chunk of its stdout, as it arrives.
            begun: Called once with the function that writes to its stdin.
            timeout_s: Time limit, in seconds.
            cwd: Working directory.
            env: Environment variables in addition to those of the sandbox.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot communicate with a program")

    @abstractmethod
    async def close(self) -> None:
        """Stop and remove the sandbox. May be called twice."""

    def leaves(self, kind: str, what: str) -> None:
        """Record a resource that remains if this process is killed. See :class:`LedgerLine`."""
        if self.line is not None:
            self.line.leaves(kind, what)

    @classmethod
    async def remove(cls, left: Mapping[str, Sequence[str]]) -> list[str]:
        """Remove the resources of a sandbox whose owner is gone. Return the failures with reasons.

        Args:
            left: Kind -> resources, as the sandbox recorded them with ``leaves``. Some may be gone
                already.
        """
        return []

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove resources labeled with a dead owner, in a ledger or not. Return their names."""
        return []

    @classmethod
    async def examine(cls) -> list[Finding]:
        """Check the requirements of this sandbox on this machine, without starting one."""
        return []
