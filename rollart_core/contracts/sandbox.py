"""Sandboxes: walls around code that somebody else, or the model, wrote.

Takes: nothing. Gives: the base of sandboxes, their spec, what a command gave. Never: says how
strong a wall is: its spec does, and ``docs/sandboxes.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rollart_core.contracts.host import Finding, LedgerLine
from rollart_core.contracts.spec import PluginSpec

RUN_VARIABLE: Final = "ROLLART_RUN"
"""Environment variable of a run's processes: the name of the run that their sandboxes are for."""


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
    stdout_cut: int | None = None
    """Where output is missing from ``stdout``: so many bytes are before the cut; None: nowhere."""
    stderr_cut: int | None = None
    """The same of ``stderr``."""


class Sandbox(ABC):
    """One box.

    ``start -> (exec | program | read_file | write_file | snapshot | restore | forward |
    forward_port)* -> close``.
    """

    line: LedgerLine | None = None
    """Its line in the ledger, set before it starts; None for a box that is in no ledger."""
    trial: ClassVar[Mapping[str, object]] = {}
    """Options of a box that only shows whether boxes start here."""

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

    async def forward_port(self, target: str) -> str:
        """Return the ``host:port`` by which programs in the box reach ``target`` (optional).

        Args:
            target: ``host:port``, as this process reaches it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no ports that lead out of it")

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
        """Run a program and speak with it over its stdin and stdout, until it ends (optional).

        Args:
            argv: The program.
            take: Gets what it writes to stdout, as it comes.
            begun: Gets, once, the function that writes to its stdin.
            timeout_s: Seconds it may live.
            cwd: Folder it runs in.
            env: Variables besides the box's own.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot speak with a program")

    @abstractmethod
    async def close(self) -> None:
        """Take the box down; may be called twice."""

    def leaves(self, kind: str, what: str) -> None:
        """Note what would be left if this process were killed; see :class:`LedgerLine`."""
        if self.line is not None:
            self.line.leaves(kind, what)

    @classmethod
    async def remove(cls, left: Mapping[str, Sequence[str]]) -> list[str]:
        """Remove what a box left whose owner is gone; return what cannot be removed now, and why.

        Args:
            left: Kind -> what, as the box noted it with ``leaves``. Some may be gone already.
        """
        return []

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove what bears the mark of a dead owner, in a ledger or not; return what it was."""
        return []

    @classmethod
    async def examine(cls) -> list[Finding]:
        """Say what this wall needs and finds on this machine, without starting a box."""
        return []
