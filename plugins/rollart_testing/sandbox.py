"""A sandbox without a box: files in memory, commands by script.

Takes: commands as Python functions. Gives: the Sandbox contract, at once. Never: starts a process,
opens a socket, or lets time pass (``sleep`` only says how long it would have taken).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TypeAlias

from rollart_core.contracts.sandbox import ExecResult, Sandbox

Files: TypeAlias = dict[str, bytes]
Command: TypeAlias = Callable[[Sequence[str], Files, bytes], ExecResult]
"""From (argv, files of the box, stdin) to a result; ``wall_s`` says how long it took."""


class FakeSandbox(Sandbox):
    """Knows ``true``, ``false``, ``echo``, ``cat``, ``sleep`` and whatever ``commands`` adds.

    Args:
        commands: argv[0] -> what it does.
        files: What is in the box when it starts.
    """

    def __init__(
        self,
        commands: Mapping[str, Command] | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._commands = {**_COMMANDS, **(commands or {})}
        self.files: Files = {_absolute(path): content for path, content in (files or {}).items()}
        self.calls: list[tuple[str, ...]] = []
        self.forwards: dict[str, str] = {}
        self._snapshots: dict[str, Files] = {}
        self._is_up = False

    async def start(self) -> None:
        """Bring the box up."""
        self._is_up = True

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
        """Run a scripted command; 127 when there is none of that name."""
        self._check()
        self.calls.append(tuple(argv))
        command = self._commands.get(argv[0])
        if command is None:
            return ExecResult(127, b"", f"{argv[0]}: not found\n".encode())
        result = command(argv, self.files, stdin)
        if result.wall_s > timeout_s:
            return ExecResult(137, b"", b"", timed_out=True, wall_s=timeout_s)
        return _cut(result, max_output_bytes)

    async def read_file(self, path: str) -> bytes:
        """Return a file."""
        self._check()
        if _absolute(path) not in self.files:
            raise FileNotFoundError(path)
        return self.files[_absolute(path)]

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        self._check()
        self.files[_absolute(path)] = content

    async def snapshot(self) -> str:
        """Keep the files."""
        self._check()
        name = f"snapshot-{len(self._snapshots)}"
        self._snapshots[name] = dict(self.files)
        return name

    async def restore(self, snapshot: str) -> None:
        """Bring the files back."""
        self._check()
        if snapshot not in self._snapshots:
            raise LookupError(f"no snapshot {snapshot!r}; there are {sorted(self._snapshots)}")
        self.files.clear()
        self.files.update(self._snapshots[snapshot])

    async def forward(self, path: str, target: str) -> None:
        """Remember what leads where."""
        self._check()
        self.forwards[path] = target

    async def close(self) -> None:
        """Take the box down; may be called twice."""
        self._is_up = False

    def _check(self) -> None:
        if not self._is_up:
            raise RuntimeError("the sandbox is not up: start() first, and not after close()")


def _absolute(path: str) -> str:
    return str(PurePosixPath("/", path))


def _cut(result: ExecResult, limit: int) -> ExecResult:
    truncated = len(result.stdout) > limit or len(result.stderr) > limit
    if not truncated:
        return result
    return replace(
        result, stdout=result.stdout[:limit], stderr=result.stderr[:limit], truncated=True
    )


def _echo(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, (" ".join(argv[1:]) + "\n").encode(), b"")


def _cat(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    missing = [path for path in argv[1:] if _absolute(path) not in files]
    if missing:
        return ExecResult(1, b"", f"cat: {missing[0]}: No such file or directory\n".encode())
    content = b"".join(files[_absolute(path)] for path in argv[1:]) if argv[1:] else stdin
    return ExecResult(0, content, b"")


def _sleep(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"", wall_s=float(argv[1]))


def _true(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"")


def _false(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(1, b"", b"")


_COMMANDS: dict[str, Command] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
}
