"""One container whose stdin and stdout belong to an agent: created, attached, started, removed.

Takes: an engine and the container's settings. Gives: a :class:`Launched`. Never: leaves a container
that could not be started, or lets one continue without the process that holds its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from rollart_core.errors import SandboxFailure
from rollart_sandboxes.cgroup import end_group, memory_group
from rollart_sandboxes.engine import Engine, EngineError

_HEAD: Final = struct.Struct(">BxxxI")
_STDOUT: Final = 1
_ASK_S: Final = 2.0
"""Seconds that the engine may take to report the state of a container."""
_REMOVED_S: Final = 10.0
_UNDO_S: Final = 10.0
_CLEANUP_S: Final = 60.0
"""Longer than a start may take: a container that the engine creates late must be removed too."""

T = TypeVar("T")


class Container:
    """A running container, and the pipes to its first process."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        pipes: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.name = name
        self.pid = 0
        self.group: Path | None = None
        """Its cgroup, if it is on this machine."""
        self._engine = engine
        self._killing: asyncio.Task[None] | None = None
        reader, self.stdin = pipes
        self.stderr = asyncio.StreamReader()
        self.stdout = _Frames(reader, self.stderr)

    @classmethod
    async def run(
        cls, engine: Engine, name: str, settings: Mapping[str, Any], *, timeout_s: float
    ) -> Container:
        """Create a container and start it.

        Args:
            engine: The Docker engine.
            name: The container's name.
            settings: The body of the API's ``containers/create``.
            timeout_s: Maximum seconds for each request.

        Raises:
            EngineError: If it cannot be created or started; then it does not exist.
            SandboxFailure: If the engine does not answer.
        """
        query = {"name": name}
        making = asyncio.create_task(
            engine.ask(
                "POST", "/containers/create", query=query, body=settings, timeout_s=_CLEANUP_S
            )
        )
        writer = None
        try:
            await within(timeout_s, asyncio.shield(making))
            # Attach before the start, so that no output is lost: the container keeps no log.
            reader, writer = await engine.attach(name)
            await within(timeout_s, engine.ask("POST", f"/containers/{name}/start"))
            return cls(engine, name, (reader, writer))
        except BaseException:
            if writer is not None:
                writer.close()
            await asyncio.shield(_undo(engine, name, making))
            raise

    async def inspect(self) -> dict[str, Any]:
        """Return the engine's data about it, and store its process id and its cgroup."""
        known: dict[str, Any] = await self._engine.ask("GET", f"/containers/{self.name}/json")
        self.pid = int(known["State"]["Pid"])
        self.group = memory_group(self.pid, holding=str(known["Id"]))
        return known

    async def state(self) -> str:
        """Return the container's state as text, or why the engine cannot report it."""
        try:
            known = await self._engine.ask("GET", f"/containers/{self.name}/json", timeout_s=_ASK_S)
        except EngineError as e:
            return "its container is gone" if e.status == 404 else str(e)
        except SandboxFailure as e:
            return str(e)
        return f"its container is {known['State']['Status']}"

    def kill(self) -> None:
        """Remove the container, whatever its state."""
        if self._killing is None:
            self._killing = asyncio.create_task(remove(self._engine, self.name))

    async def wait(self) -> int:
        """Wait until the container is removed; if the engine is gone, kill its processes directly.

        Raises:
            SandboxFailure: If neither is possible. The engine removes it after a restart.
        """
        self.stdout.end()
        try:
            async with asyncio.timeout(_REMOVED_S):
                if self._killing is not None:
                    await self._killing
                await gone(self._engine, self.name)
        except (SandboxFailure, TimeoutError) as e:
            if self.group is None or not end_group(self.group):
                message = f"container {self.name} may be left: {e or 'its engine does not answer'}"
                raise SandboxFailure(message, boundary="sandbox.close") from e
        return 0


async def remove(engine: Engine, name: str) -> None:
    """Kill and remove a container with its volumes, if it exists.

    Raises:
        SandboxFailure: If it cannot be removed.
    """
    try:
        await engine.ask(
            "DELETE", f"/containers/{name}", query={"force": 1, "v": 1}, timeout_s=_CLEANUP_S
        )
    except EngineError as e:
        if e.status == 409:  # its removal is already in progress, for example by the engine
            await gone(engine, name)
        elif e.status != 404:
            raise


async def gone(engine: Engine, name: str) -> None:
    """Wait until a container is removed."""
    try:
        query = {"condition": "removed"}
        path = f"/containers/{name}/wait"
        await engine.ask("POST", path, query=query, timeout_s=_CLEANUP_S)
    except EngineError as e:
        if e.status != 404:
            raise


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """Await an operation of the engine, with a time limit.

    Raises:
        SandboxFailure: If the time is over.
    """
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError as e:
        message = f"the Docker engine did not start the sandbox within {timeout_s:g} s"
        raise SandboxFailure(message, boundary="sandbox.start") from e


async def _undo(engine: Engine, name: str, making: asyncio.Task[Any]) -> None:
    """Remove a container that the engine may still create; the sweep removes missed ones."""
    with contextlib.suppress(SandboxFailure, TimeoutError):
        async with asyncio.timeout(_UNDO_S):
            with contextlib.suppress(SandboxFailure):
                await asyncio.shield(making)
            await remove(engine, name)


class _Frames:
    """The stdout part of a stream that also carries stderr; it reads only on request."""

    def __init__(self, reader: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self._reader = reader
        self._stderr = stderr
        self._held = bytearray()

    async def readexactly(self, n: int, /) -> bytes:
        """Return ``n`` bytes of stdout."""
        while len(self._held) < n:
            try:
                stream, size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                content = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError) as e:
                self.end()
                raise asyncio.IncompleteReadError(bytes(self._held), n) from e
            if stream == _STDOUT:
                self._held += content
            else:
                self._stderr.feed_data(content)
        given = bytes(self._held[:n])
        del self._held[:n]
        return given

    def end(self) -> None:
        """End the stderr stream for its reader; may be called twice."""
        self._stderr.feed_eof()
