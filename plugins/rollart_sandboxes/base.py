"""The base class of all sandboxes: an agent inside, a connection to it, snapshots on the host.

Takes: a way to launch the agent, from each sandbox type. Gives: the Sandbox contract. Never:
unpacks data from a sandbox on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.config import SandboxConfig, SandboxLeaseConfig
from rollart_sandboxes.connection import CHUNK, Connection
from rollart_sandboxes.launched import Launched
from rollart_sandboxes.pool.owner import is_left, stamp
from rollart_sandboxes.proxy import PORT, Proxy

_GRACE_S: Final = 20.0
"""Seconds after the timeout of an exec within which the agent must answer."""
_END_S: Final = 5.0
_SNAPSHOTS: Final = "rollart-snapshots-"
_LAST_WORDS_S: Final = 0.5


class AgentSandbox(Sandbox):
    """A sandbox whose agent communicates over the stdin and stdout of one process.

    Args:
        options: The fields of the sandbox type's config.
    """

    config_class: ClassVar[type[SandboxConfig]] = SandboxConfig

    def __init__(self, **options: object) -> None:
        self._config = self.config_class.model_validate(options)
        self._process: Launched | None = None
        self._connection: Connection | None = None
        self._snapshots: Path | None = None
        self._num_snapshots = 0
        self._complaints: list[bytes] = []
        self._listening: asyncio.Task[None] | None = None
        self.agent_pid: int | None = None
        """Process id of the agent on the host; None until the agent runs."""
        self.root = ""
        """The working folder, as commands in the sandbox see it."""

    @abstractmethod
    async def _launch(self) -> Launched:
        """Start the process whose stdin and stdout belong to the agent."""

    @abstractmethod
    def _hello(self) -> dict[str, Any]:
        """Return the agent's settings."""

    async def _launched(self) -> None:
        """Prepare the sandbox before anything runs in it."""

    async def _gone(self) -> None:
        """Remove what the sandbox type left on the host."""

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove the snapshots of processes that have ended, with or without a ledger entry."""
        found = Path(tempfile.gettempdir()).glob(f"{_SNAPSHOTS}*")
        left = [folder for folder in found if is_left(folder.name)]
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return [f"snapshots {folder}" for folder in left if not folder.exists()]

    async def start(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxFailure: If the sandbox does not start.
        """
        if self._process is not None:
            raise RuntimeError("a sandbox can start only once: create another one")
        try:
            await self._start()
        except BaseException:
            with contextlib.suppress(SandboxFailure):
                await asyncio.shield(self.close())
            raise

    async def _start(self) -> None:
        self._process = process = await self._launch()
        assert process.stdin is not None
        assert process.stdout is not None
        self._listening = asyncio.create_task(self._hear(process))
        self._connection = Connection(process.stdout, process.stdin, explain=self._explain)
        await self._launched()
        hello = {"ttl_s": self._config.ttl_s, **self._hello()}
        with self._proxied(self._connection, hello):
            said = await self._connection.open(hello, timeout_s=self._config.start_timeout_s)
        self.root = said["root"]
        if self.agent_pid is None:
            self.agent_pid = process.pid

    @contextlib.contextmanager
    def _proxied(self, connection: Connection, hello: dict[str, Any]) -> Iterator[None]:
        """Let the agent listen for connections to the allowed hosts, if the config allows any."""
        if not isinstance(self._config, SandboxLeaseConfig) or not self._config.network:
            yield
            return
        with connection.serving(Proxy(self._config.network).serve) as number:
            hello["proxy"] = {"port": PORT, "forward": number}
            yield

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
        """Run a command. When it ends, all processes that it started are killed.

        Output over the limit loses its middle: the first and the last bytes are kept. If a signal
        ended the command, the exit code is 128 plus the signal's number, as in a shell.

        Raises:
            OSError: If the sandbox cannot run it (no such ``cwd``, too many processes).
            SandboxFailure: If the sandbox is gone.
        """
        if not argv:
            raise ValueError("argv is empty")
        header = self._command(argv, timeout_s, cwd, env, max_output_bytes)
        call = self._up().call("exec", stdin, **header)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                reply, body = await call
        except TimeoutError as e:
            raise SandboxFailure("the agent does not answer", boundary="sandbox.exec") from e
        return _result(reply, body)

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
        """Run a program and exchange data with it over its stdin and stdout until it ends.

        Its stderr is collected as in ``exec``. Cancellation kills the program.

        Raises:
            OSError: As ``exec``.
            SandboxFailure: If the sandbox is gone.
        """
        header = self._command(argv, timeout_s, cwd, env, 1 << 16)
        return _result(*await self._up().program(take, begun, **header))

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file; a relative path starts at the working folder."""
        content = bytearray()
        most = self._config.file_bytes
        take = _bounded(content, most)
        await self._up().call("read_file", path=path, max_bytes=most, take=take)
        return bytes(content)

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically, and create its folders."""
        pieces = _pieces(content)
        await self._up().call("write_file", path=path, mode=mode, pieces=pieces)

    async def snapshot(self) -> str:
        """Store an archive of the writable folders on the host until the sandbox is closed."""
        connection = self._up()
        if self._snapshots is None:
            self._snapshots = Path(tempfile.mkdtemp(prefix=f"{_SNAPSHOTS}{stamp()}"))
            self.leaves("folder", str(self._snapshots))
        name = f"snapshot-{self._num_snapshots}"
        self._num_snapshots += 1
        part = self._snapshots / f"{name}.part"
        with part.open("wb") as file:

            def take(data: bytes) -> None:
                file.write(data)

            await connection.call("snapshot", take=take, name=name)
        part.rename(self._snapshots / f"{name}.archive")
        return name

    async def restore(self, snapshot: str) -> None:
        """Restore the writable folders from a snapshot of this sandbox.

        Raises:
            LookupError: If there is no such snapshot.
        """
        kept = sorted(self._snapshots.glob("*.archive")) if self._snapshots else []
        path = next((path for path in kept if path.stem == snapshot), None)
        if path is None:
            names = [path.stem for path in kept]
            raise LookupError(f"no snapshot {snapshot!r}; there are {names}")
        try:
            await self._rewind(path, whole=False)
        except OSError:  # a full restore starts from empty folders, so the cause does not matter
            await self._rewind(path, whole=True)

    async def _rewind(self, path: Path, *, whole: bool) -> None:
        """Restore what the agent finds changed since the snapshot, or everything."""
        connection, name = self._up(), path.stem
        reply, body = await connection.call("rewind", name=name, whole=whole)
        if not reply.get("done"):
            spans = [(0, path.stat().st_size)] if reply["whole"] else json.loads(body)
            await connection.call("restore", name=name, pieces=_pieces_of(path, spans))

    async def forward(self, path: str, target: str) -> None:
        """Create a unix socket at ``path`` in the sandbox, connected to ``target`` (host:port)."""
        await self._up().forward(path, target)

    async def forward_port(self, target: str) -> str:
        """Return a ``host:port`` on the sandbox's loopback that connects to ``target``."""
        return await self._up().forward_port(target)

    async def close(self) -> None:
        """Stop the sandbox; may be called twice.

        Raises:
            SandboxFailure: If something may be left, for garbage collection to remove.
        """
        process, self._process = self._process, None
        try:
            if process is not None:
                if self._connection is not None:
                    await self._connection.close()
                elif process.stdin is not None:
                    process.stdin.close()
                await _end(process)
        finally:
            if self._listening is not None:
                await asyncio.gather(self._listening, return_exceptions=True)
            await self._gone()
            if self._snapshots is not None:
                shutil.rmtree(self._snapshots, ignore_errors=True)

    def _command(
        self,
        argv: Sequence[str],
        timeout_s: float,
        cwd: str | None,
        env: Mapping[str, str] | None,
        max_output_bytes: int,
    ) -> dict[str, Any]:
        return {
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "max_output_bytes": min(max_output_bytes, self._config.output_bytes),
        }

    def _up(self) -> Connection:
        if self._process is None or self._connection is None:
            raise RuntimeError("the sandbox is not up: start() first, and not after close()")
        return self._connection

    async def _hear(self, process: Launched) -> None:
        """Keep the last stderr output of the launched process."""
        assert process.stderr is not None
        while data := await process.stderr.read(4096):
            self._complaints = [*self._complaints[-3:], data]

    async def _explain(self) -> str:
        if self._listening is not None:  # the last stderr output arrives shortly after the end
            await asyncio.wait({self._listening}, timeout=_LAST_WORDS_S)
        said = b"".join(self._complaints).decode(errors="replace").strip().splitlines()
        return f": {said[-1][:300]}" if said else ""


def _result(reply: Mapping[str, Any], body: bytes) -> ExecResult:
    end = int(reply["out"])
    out, err = body[:end], body[end:]
    cuts = reply.get("cuts") or (None,)
    if "timed_out" not in reply:  # the command never ran, and the body is the reason
        out, err = b"", body
    return ExecResult(
        int(reply["exit_code"]),
        out,
        err,
        timed_out=bool(reply.get("timed_out")),
        truncated=any(cut is not None for cut in cuts),
        wall_s=float(reply["wall_s"]),
        stdout_cut=cuts[0],
        stderr_cut=cuts[-1],
    )


def _bounded(content: bytearray, most: int) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        if len(content) + len(data) > most:
            raise ValueError(f"the file grew beyond {most} bytes while it was read")
        content.extend(data)

    return take


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), CHUNK):
        yield content[at : at + CHUNK]


async def _pieces_of(path: Path, spans: Iterable[Sequence[int]]) -> AsyncIterator[bytes]:
    """Yield parts of a file; skip what is beyond its end."""
    with path.open("rb") as file:
        for start, length in spans:
            file.seek(max(0, int(start)))
            left = int(length)
            while left > 0 and (piece := file.read(min(CHUNK, left))):
                left -= len(piece)
                yield piece


async def _end(process: Launched) -> None:
    """Wait for a process whose stdin is closed; kill it if it does not end in time."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
