"""Streams between a box and the host: forwarded sockets, and programs that are spoken with.

Takes: the agent's frames of one stream. Gives: a TCP connection for each socket that connects in
the box, with its bytes both ways; and to whoever speaks with a program, what the program writes.
Never: holds more than a window of bytes for a reader that is slow, or lets the box choose a target.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

WINDOW: Final = 1 << 20
"""Bytes on their way in one direction; the agent has the same."""
CHUNK: Final = 1 << 17
Take = Callable[[bytes], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
Target = tuple[str, int] | Serve
"""Where a stream leads: a host and port, or what serves it in this process."""


class _Send(Protocol):
    def __call__(self, header: Mapping[str, object], body: bytes = ..., /) -> None: ...


class Tunnels:
    """The tunnels of one box.

    Args:
        send: Sends the agent a frame.
    """

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._targets: dict[int, Target] = {}
        self._numbers = itertools.count(1)
        self._tunnels: dict[int, _Tunnel] = {}
        self._programs: dict[int, _Program] = {}

    def speak(self, take: Take) -> tuple[int, Take]:
        """Return the stream of a program that is about to start, and what writes to it.

        Args:
            take: Gets what the program writes, at once.
        """
        number = -next(self._numbers)  # the agent's own are positive
        self._programs[number] = _Program(number, self._send, take)
        return number, partial(self._send, {"op": "stream", "s": number, "what": "data"})

    def forget(self, number: int) -> None:
        """Drop what a program still says."""
        self._programs.pop(number, None)

    @contextmanager
    def leading_to(self, target: Target) -> Iterator[int]:
        """Give a target a number; it is forgotten when the block fails."""
        number = next(self._numbers)
        self._targets[number] = target
        try:
            yield number
        except BaseException:
            del self._targets[number]
            raise

    def take(self, header: Mapping[str, Any], body: bytes) -> None:
        """Take a frame of a stream."""
        number, op = int(header["s"]), header["op"]
        if number < 0:
            if op == "data" and number in self._programs:
                self._programs[number].take(body)
        elif op == "open":
            if number in self._tunnels:
                raise ValueError(f"stream {number} is opened twice")
            target = self._targets[header["forward"]]
            self._tunnels[number] = _Tunnel(number, target, self._send, self._over)
        elif number in self._tunnels:
            self._tunnels[number].take(op, int(header.get("n", 0)), body)

    def close(self) -> None:
        """End all of them."""
        for tunnel in list(self._tunnels.values()):
            tunnel.close()

    def _over(self, number: int) -> None:
        self._tunnels.pop(number, None)


class _Program:
    """What a program in the box writes; half a window is acknowledged at once."""

    def __init__(self, number: int, send: _Send, take: Take) -> None:
        self._number = number
        self._send = send
        self._take = take
        self._held = 0

    def take(self, body: bytes) -> None:
        self._held += len(body)
        if self._held >= WINDOW // 2:
            stream = {"op": "stream", "s": self._number, "what": "ack", "n": self._held}
            self._send(stream)
            self._held = 0
        self._take(body)


class _Tunnel:
    def __init__(
        self, number: int, target: Target, send: _Send, over: Callable[[int], None]
    ) -> None:
        self._number = number
        self._send = send
        self._to_target: asyncio.Queue[bytes] = asyncio.Queue()
        self._credit = WINDOW
        self._held = 0
        self._has_credit = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(target))
        # Not in the task: one that is cancelled before its first step never executes any of it.
        self._task.add_done_callback(lambda _: over(number))

    def take(self, op: str, count: int, body: bytes) -> None:
        if op == "data":
            self._held += len(body)
            if self._held > 2 * WINDOW:  # an agent keeps to its credit
                self.close()
            self._to_target.put_nowait(body)
        elif op == "eof":
            self._to_target.put_nowait(b"")
        elif op == "ack":
            self._credit += count
            self._has_credit.set()
        else:
            self.close()

    def close(self) -> None:
        self._task.cancel()

    def _tell(self, what: str, body: bytes = b"", **more: int) -> None:
        self._send({"op": "stream", "s": self._number, "what": what, **more}, body)

    async def _reach(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(target, tuple):
            return await asyncio.open_connection(*target)
        ours, theirs = socket.socketpair()
        try:
            served = await asyncio.open_connection(sock=theirs)
        except BaseException:  # asyncio has closed `theirs`
            ours.close()
            raise
        self._serving = asyncio.create_task(target(*served))
        # Not in `target`, which may be cancelled before its first step.
        self._serving.add_done_callback(lambda _: served[1].close())
        return await asyncio.open_connection(sock=ours)

    async def _run(self, target: Target) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._reach(target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._from_sandbox(writer))
                both.create_task(self._to_sandbox(reader))
        except (OSError, ExceptionGroup):
            self._tell("reset")
        finally:
            if writer is not None:
                writer.close()
            if self._serving is not None:
                self._serving.cancel()

    async def _from_sandbox(self, writer: asyncio.StreamWriter) -> None:
        while data := await self._to_target.get():
            writer.write(data)
            await writer.drain()
            self._held -= len(data)
            self._tell("ack", n=len(data))
        if writer.can_write_eof():
            writer.write_eof()

    async def _to_sandbox(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._credit <= 0:
                self._has_credit.clear()
                await self._has_credit.wait()
            data = await reader.read(min(CHUNK, self._credit))
            if not data:
                self._tell("eof")
                return
            self._credit -= len(data)
            self._tell("data", data)
