"""One container whose stdin and stdout are an agent's: made, attached to, started, removed.

Takes: an engine and what it is to make. Gives: a :class:`Launched`. Never: leaves a container that
could not be started, or lets one live on without the process that holds its stdin.
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
"""How long the engine may take to say what became of a container."""
_REMOVED_S: Final = 10.0
_UNDO_S: Final = 10.0
_CLEANUP_S: Final = 60.0
"""Longer than a start may take: what an engine makes late has to be removed too."""

T = TypeVar("T")


class Container:
    """A container that runs, and the pipes to its first process."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        pipes: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.name = name
        self.pid = 0
        self.group: Path | None = None
        """Its cgroup, where it is on this machine."""
        self._engine = engine
        self._killing: asyncio.Task[None] | None = None
        reader, self.stdin = pipes
        self.stderr = asyncio.StreamReader()
        self.stdout = _Frames(reader, self.stderr)

    @classmethod
    async def run(
        cls, engine: Engine, name: str, settings: Mapping[str, Any], *, timeout_s: float
    ) -> Container:
        """Make a container and start it.

        Args:
            engine: Where.
            name: What it is called.
            settings: The body of the API's ``containers/create``.
            timeout_s: Seconds each request may take.

        Raises:
            EngineError: When it cannot be made or started; then it is not there.
            SandboxFailure: When the engine does not answer.
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
            # Before it starts, so that nothing it says is lost: it keeps no log.
            reader, writer = await engine.attach(name)
            await within(timeout_s, engine.ask("POST", f"/containers/{name}/start"))
            return cls(engine, name, (reader, writer))
        except BaseException:
            if writer is not None:
                writer.close()
            await asyncio.shield(_undo(engine, name, making))
            raise

    async def inspect(self) -> dict[str, Any]:
        """Return what the engine knows of it, and keep its process id and its cgroup."""
        known: dict[str, Any] = await self._engine.ask("GET", f"/containers/{self.name}/json")
        self.pid = int(known["State"]["Pid"])
        self.group = memory_group(self.pid, holding=str(known["Id"]))
        return known

    async def state(self) -> str:
        """Return in words what the engine knows of it, or why it cannot say."""
        try:
            known = await self._engine.ask("GET", f"/containers/{self.name}/json", timeout_s=_ASK_S)
        except EngineError as e:
            return "its container is gone" if e.status == 404 else str(e)
        except SandboxFailure as e:
            return str(e)
        return f"its container is {known['State']['Status']}"

    def kill(self) -> None:
        """Remove it, whatever it does."""
        if self._killing is None:
            self._killing = asyncio.create_task(remove(self._engine, self.name))

    async def wait(self) -> int:
        """Wait until it is removed; where the engine is gone, end it without.

        Raises:
            SandboxFailure: When neither can be done. An engine that comes back removes it.
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
    """Kill and remove a container with its volumes, if it is there.

    Raises:
        SandboxFailure: When it cannot be removed.
    """
    try:
        await engine.ask(
            "DELETE", f"/containers/{name}", query={"force": 1, "v": 1}, timeout_s=_CLEANUP_S
        )
    except EngineError as e:
        if e.status == 409:  # somebody is at it, such as the engine itself
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
    """Await what an engine does, at most for a time.

    Raises:
        SandboxFailure: When the time is over.
    """
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError as e:
        message = f"the Docker engine did not start the box within {timeout_s:g} s"
        raise SandboxFailure(message, boundary="sandbox.start") from e


async def _undo(engine: Engine, name: str, making: asyncio.Task[Any]) -> None:
    """Remove a container that an engine may be making still; the sweep removes what is missed."""
    with contextlib.suppress(SandboxFailure, TimeoutError):
        async with asyncio.timeout(_UNDO_S):
            with contextlib.suppress(SandboxFailure):
                await asyncio.shield(making)
            await remove(engine, name)


class _Frames:
    """The stdout in a stream that carries stderr too; nothing is read before it is asked for."""

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
        """Let go of who reads stderr; may be called twice."""
        self._stderr.feed_eof()
