"""One container whose stdin and stdout are an agent's: made, attached to, started, removed.

Takes: an engine and what it is to make. Gives: a :class:`Launched`. Never: leaves a container that
could not be started, or lets one live on without the process that holds its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Mapping
from typing import Any, Final

from rollart_core.errors import SandboxFailure
from rollart_plugins.sandboxes.engine import Engine, EngineError

_HEAD: Final = struct.Struct(">BxxxI")
_STDOUT: Final = 1
_REMOVED_S: Final = 30.0


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
        await engine.ask(
            "POST",
            "/containers/create",
            query={"name": name},
            body=settings,
            timeout_s=timeout_s,
        )
        writer = None
        try:
            # Before it starts, so that nothing it says is lost: it keeps no log.
            reader, writer = await engine.attach(name)
            await engine.ask("POST", f"/containers/{name}/start", timeout_s=timeout_s)
            return cls(engine, name, (reader, writer))
        except BaseException:
            if writer is not None:
                writer.close()
            with contextlib.suppress(SandboxFailure):
                await asyncio.shield(remove(engine, name))
            raise

    async def inspect(self) -> dict[str, Any]:
        """Return what the engine knows of it, and keep its process id."""
        known: dict[str, Any] = await self._engine.ask("GET", f"/containers/{self.name}/json")
        self.pid = int(known["State"]["Pid"])
        return known

    def kill(self) -> None:
        """Remove it, whatever it does."""
        if self._killing is None:
            self._killing = asyncio.create_task(remove(self._engine, self.name))

    async def wait(self) -> int:
        """Wait until it is removed; an engine that is gone has taken it along, or will."""
        with contextlib.suppress(SandboxFailure):
            if self._killing is not None:
                await self._killing
            await gone(self._engine, self.name)
        self.stdout.end()
        return 0


async def remove(engine: Engine, name: str) -> None:
    """Kill and remove a container with its volumes, if it is there.

    Raises:
        SandboxFailure: When it cannot be removed.
    """
    try:
        await engine.ask("DELETE", f"/containers/{name}", query={"force": 1, "v": 1})
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
        await engine.ask("POST", path, query=query, timeout_s=_REMOVED_S)
    except EngineError as e:
        if e.status != 404:
            raise


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
        """Let go of who reads stderr."""
        self._stderr.feed_eof()
