"""The host's end of a sandbox: concurrent calls to the agent inside, over one pair of pipes.

Streams use the same pipes (:class:`Tunnels`): one TCP connection, in both directions, for each
socket that connects in the sandbox, and the output of a program that the host exchanges data with.

Takes: the pipes of a process that reads the source from :func:`bootstrap`. Gives: answers; plain
OSErrors for operations that the sandbox refuses, and ``SandboxFailure`` for all calls once the
agent is gone. Never: trusts a length or a header from a sandbox, holds more of a file than
requested or more than one window of bytes for a slow reader, or lets the sandbox choose the target
of a stream.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import marshal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from typing import Any, Final, Protocol

from rollart_core.errors import SandboxFailure
from rollart_sandboxes.launched import Reads

PROTOCOL: Final = 1
CHUNK: Final = 1 << 18
MAX_FRAME: Final = 1 << 26
IN_FLIGHT: Final = 1 << 20
"""Maximum bytes of an upload that the agent has not acknowledged."""
LENGTHS: Final = struct.Struct(">II")
OnStarted = Callable[[Callable[[bytes], None]], None]


INSIDE: Final = ("processes", "tree", "streams", "files", "snapshots", "agent")
"""The modules that are sent into the sandbox, in dependency order."""

WINDOW: Final = 1 << 20
"""Maximum unacknowledged bytes in one direction; the agent uses the same value."""
STREAM_CHUNK: Final = 1 << 17
Take = Callable[[bytes], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
Target = tuple[str, int] | Serve
"""The target of a stream: a host and port, or a coroutine that serves it in this process."""


@cache
def sources() -> dict[str, str]:
    """Return the source of each module of the agent."""
    folder = f"{__package__}.inside"
    return {f"{folder}.{n}": files(folder).joinpath(f"{n}.py").read_text("utf-8") for n in INSIDE}


@cache
def source() -> bytes:
    """Return the agent's source."""
    return marshal.dumps(list(sources().items()), 2)


@cache
def compiled() -> bytes:
    """Return the agent as this Python's bytecode: compiling takes a third of a sandbox's start."""
    codes = [(n, compile(text, n, "exec", dont_inherit=True)) for n, text in sources().items()]
    return marshal.dumps(codes)


@cache
def bootstrap() -> str:
    """Return the program for ``python -c`` that reads the agent from its stdin and runs it.

    It loads the bytecode if the sandbox's Python has the host's bytecode format, else the source.
    """
    return (
        "import os,sys,marshal,_frozen_importlib_external as f\n"
        f"c={len(compiled())}\nn=c+{len(source())}\nb=b''\n"
        "while len(b)<n:\n d=os.read(0,n-len(b))\n if not d:raise SystemExit(3)\n b+=d\n"
        f"s=f.MAGIC_NUMBER=={MAGIC_NUMBER!r}\n"
        "for k,v in marshal.loads(b[:c] if s else b[c:]):\n"
        " m=sys.modules[k]=type(os)(k)\n"
        " exec(v if s else compile(v,k,'exec'),m.__dict__)\n"
        "m.main()"
    )


class Call:
    """One call that waits for its answer."""

    def __init__(self, take: Callable[[bytes], None] | None) -> None:
        self.answer: asyncio.Future[tuple[dict[str, Any], bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self.take = take
        self.unacknowledged = 0
        self.acknowledged = asyncio.Event()


class Connection:
    """Calls to one agent.

    Args:
        reader: Reads what the agent writes.
        writer: Writes what the agent reads.
        explain: Returns why the sandbox may be gone, for the message of the failure.
    """

    def __init__(
        self,
        reader: Reads,
        writer: asyncio.StreamWriter,
        *,
        explain: Callable[[], Awaitable[str]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._explain = explain
        self._calls: dict[int, Call] = {}
        self._ids = itertools.count(1)
        self._failure: SandboxFailure | None = None
        self._tunnels = Tunnels(self._send)
        self._listening: asyncio.Task[None] | None = None

    async def open(self, hello: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send the agent and its settings; return the agent's description of itself.

        Raises:
            SandboxFailure: If it does not answer in time, or uses another protocol.
        """
        self._listening = asyncio.create_task(self._listen())
        self._writer.write(compiled() + source())
        try:
            async with asyncio.timeout(timeout_s):
                said, _ = await self.call("hello", **hello)
        except TimeoutError as e:
            message = f"the sandbox did not answer within {timeout_s:g} s of its start"
            raise SandboxFailure(message, boundary="sandbox.start") from e
        if said.get("protocol") != PROTOCOL or not isinstance(said.get("root"), str):
            raise SandboxFailure(f"the agent uses another protocol: {said}", boundary="sandbox")
        return said

    async def call(
        self,
        op: str,
        body: bytes = b"",
        *,
        take: Callable[[bytes], None] | None = None,
        pieces: AsyncIterator[bytes] | None = None,
        **header: object,
    ) -> tuple[dict[str, Any], bytes]:
        """Make one call; cancellation also ends it in the sandbox.

        Args:
            op: The operation.
            body: Bytes of the request.
            take: Receives each part of a long answer.
            pieces: A long body, sent as fast as the agent reads it.
            header: Further fields of the operation.

        Raises:
            OSError: The error that the sandbox returned.
            SandboxFailure: If the agent is gone.
        """
        if self._failure is not None:
            raise self._again(op)
        number, call = next(self._ids), Call(take)
        self._calls[number] = call
        try:
            self._send({"id": number, "op": op, **header}, body)
            if pieces is not None:
                await self._upload(number, call, pieces)
            reply, content = await call.answer
        except asyncio.CancelledError:
            self._send({"op": "cancel", "call": number})
            raise
        finally:
            self._calls.pop(number, None)
        if "error" in reply:
            raise _said(reply["error"], op)
        return reply, content

    async def forward(self, path: str, target: str) -> None:
        """Create a socket in the sandbox, connected to ``target``, a ``host:port`` of the host."""
        with self._tunnels.leading_to(_target(target)) as number:
            await self.call("forward", path=path, forward=number)

    async def forward_port(self, target: str) -> str:
        """Let the agent listen on a free port; return its address in the sandbox."""
        with self._tunnels.leading_to(_target(target)) as number:
            reply, _ = await self.call("forward_port", forward=number)
        return f"127.0.0.1:{reply['port']}"

    @contextmanager
    def serving(self, serve: Serve) -> Iterator[int]:
        """Give a stream server in this process a number, for the agent's settings."""
        with self._tunnels.leading_to(serve) as number:
            yield number

    async def program(
        self, take: Callable[[bytes], None], begun: OnStarted, **header: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Run a program whose stdin and stdout are a stream; return what ``exec`` returns.

        Args:
            take: Receives what the program writes to stdout.
            begun: Receives, immediately, the function that writes to its stdin.
            header: As for ``exec``.
        """
        number, write = self._tunnels.speak(take)
        begun(write)
        try:
            return await self.call("exec", stream=number, **header)
        finally:
            self._tunnels.forget(number)

    async def close(self) -> None:
        """End all calls and tunnels; may be called twice."""
        self._fail("the sandbox is closed")
        self._tunnels.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._writer.close()

    async def _upload(self, number: int, call: Call, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            while call.unacknowledged >= IN_FLIGHT and not call.answer.done():
                call.acknowledged.clear()
                await call.acknowledged.wait()
            if call.answer.done():
                return
            call.unacknowledged += len(piece)
            self._send({"id": number, "op": "data"}, piece)
        self._send({"id": number, "op": "data"})

    def _send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        if self._failure is not None:
            return
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + len(body) > MAX_FRAME:
            raise ValueError(f"a call has {len(text) + len(body)} bytes; the limit is {MAX_FRAME}")
        self._writer.write(LENGTHS.pack(len(text), len(body)) + text + body)

    async def _listen(self) -> None:
        try:
            while True:
                head, body = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
                if head + body > MAX_FRAME:
                    raise ValueError(f"a frame of {head + body} bytes is too large")
                header = json.loads(await self._reader.readexactly(head))
                self._take(header, await self._reader.readexactly(body) if body else b"")
        except (asyncio.IncompleteReadError, OSError):
            self._fail(f"the sandbox is gone{await self._explain()}")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            self._fail(f"the sandbox's answer violates the protocol: {e}")

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if "s" in header:
            self._tunnels.take(header, body)
            return
        call = self._calls.get(header["id"])
        if call is None:
            return
        if "ack" in header:
            call.unacknowledged -= int(header["ack"])
            call.acknowledged.set()
        elif "part" in header:
            if call.take is not None:
                call.take(body)
        elif not call.answer.done():
            call.answer.set_result((header, body))
            call.acknowledged.set()

    def _fail(self, message: str) -> None:
        """End all current and later calls; the first reason is kept."""
        if self._failure is None:
            self._failure = SandboxFailure(message, boundary="sandbox")
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(self._again("call"))
            call.acknowledged.set()

    def _again(self, op: str) -> SandboxFailure:
        return SandboxFailure(str(self._failure), boundary=f"sandbox.{op}")


def _target(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"target must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


def _said(error: Mapping[str, Any], op: str) -> Exception:
    """Return the error that the agent reported."""
    number, message = error.get("errno"), str(error.get("message", ""))
    if isinstance(number, int):
        return OSError(number, message, error.get("filename"))
    return SandboxFailure(f"{error.get('type')}: {message}", boundary=f"sandbox.{op}")


class _Send(Protocol):
    def __call__(self, header: Mapping[str, object], body: bytes = ..., /) -> None: ...


class Tunnels:
    """The tunnels of one sandbox.

    Args:
        send: Sends a frame to the agent.
    """

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._targets: dict[int, Target] = {}
        self._numbers = itertools.count(1)
        self._tunnels: dict[int, _Tunnel] = {}
        self._programs: dict[int, _Program] = {}

    def speak(self, take: Take) -> tuple[int, Take]:
        """Return the stream number of a program that is about to start, and its write function.

        Args:
            take: Receives what the program writes, immediately.
        """
        number = -next(self._numbers)  # the agent's own numbers are positive
        self._programs[number] = _Program(number, self._send, take)
        return number, partial(self._send, {"op": "stream", "s": number, "what": "data"})

    def forget(self, number: int) -> None:
        """Ignore further output of a program."""
        self._programs.pop(number, None)

    @contextmanager
    def leading_to(self, target: Target) -> Iterator[int]:
        """Give a target a number; the number is removed if the block fails."""
        number = next(self._numbers)
        self._targets[number] = target
        try:
            yield number
        except BaseException:
            del self._targets[number]
            raise

    def take(self, header: Mapping[str, Any], body: bytes) -> None:
        """Process a frame of a stream."""
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
        """End all tunnels."""
        for tunnel in list(self._tunnels.values()):
            tunnel.close()

    def _over(self, number: int) -> None:
        self._tunnels.pop(number, None)


class _Program:
    """Output of a program in the sandbox; each half window is acknowledged."""

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
        # Not in the task: a task that is cancelled before its first step executes nothing.
        self._task.add_done_callback(lambda _: over(number))

    def take(self, op: str, count: int, body: bytes) -> None:
        if op == "data":
            self._held += len(body)
            if self._held > 2 * WINDOW:  # a correct agent stays within its credit
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

    def _notify(self, what: str, body: bytes = b"", **more: int) -> None:
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
            self._notify("reset")
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
            self._notify("ack", n=len(data))
        if writer.can_write_eof():
            writer.write_eof()

    async def _to_sandbox(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._credit <= 0:
                self._has_credit.clear()
                await self._has_credit.wait()
            data = await reader.read(min(STREAM_CHUNK, self._credit))
            if not data:
                self._notify("eof")
                return
            self._credit -= len(data)
            self._notify("data", data)
