"""The host's end of a box: many calls at once to the agent inside, over one pair of pipes.

Takes: the pipes of a process that reads :data:`BOOTSTRAP`'s source. Gives: answers; plain OSErrors
for what the box refused, ``SandboxFailure`` for all calls once the agent is gone. Never: trusts a
length or a header that comes out of a box, or holds more of a file than it was asked to.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import marshal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from typing import Any, Final

from rollart_core.errors import SandboxFailure
from rollart_sandboxes.launched import Reads
from rollart_sandboxes.tunnels import Serve, Tunnels

PROTOCOL: Final = 1
CHUNK: Final = 1 << 18
MAX_FRAME: Final = 1 << 26
IN_FLIGHT: Final = 1 << 20
"""Most bytes of an upload that the agent has not acknowledged."""
LENGTHS: Final = struct.Struct(">II")
StartedEval = Callable[[Callable[[bytes], None]], None]


INSIDE: Final = (
    *("processes", "contents", "tree", "packing", "restoring", "streams", "files", "snapshots"),
    "agent",
)
"""What is sent into the box, in the order in which it is needed."""


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
    """Return the agent as this Python's bytecode: compiling takes a third of a box's start."""
    codes = [(n, compile(text, n, "exec", dont_inherit=True)) for n, text in sources().items()]
    return marshal.dumps(codes)


@cache
def bootstrap() -> str:
    """Return the program for ``python -c`` that reads the agent from its stdin and becomes it.

    It takes the bytecode where the box's Python is of the host's kind, the source elsewhere.
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
        reader: What the agent writes.
        writer: What the agent reads.
        explain: Why the box may be gone, for the message of the failure.
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
        """Send the agent and its settings; return what it says of itself.

        Raises:
            SandboxFailure: When it does not answer in time, or speaks another protocol.
        """
        self._listening = asyncio.create_task(self._listen())
        self._writer.write(compiled() + source())
        try:
            async with asyncio.timeout(timeout_s):
                said, _ = await self.call("hello", **hello)
        except TimeoutError as e:
            message = f"the box did not answer within {timeout_s:g} s of its start"
            raise SandboxFailure(message, boundary="sandbox.start") from e
        if said.get("protocol") != PROTOCOL or not isinstance(said.get("root"), str):
            raise SandboxFailure(f"the agent speaks another protocol: {said}", boundary="sandbox")
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
        """Make one call; cancelling it ends it in the box too.

        Args:
            op: What is asked.
            body: Bytes that go with it.
            take: Gets each part of a long answer.
            pieces: A long body, sent as fast as the agent takes it.
            header: What else the operation needs.

        Raises:
            OSError: What the box said to it.
            SandboxFailure: When the agent is gone.
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
        """Make a socket in the box that leads to ``target``, ``host:port`` as the host sees it."""
        with self._tunnels.leading_to(_target(target)) as number:
            await self.call("forward", path=path, forward=number)

    async def forward_port(self, target: str) -> str:
        """Have the agent listen on a free port; return how programs in the box reach it."""
        with self._tunnels.leading_to(_target(target)) as number:
            reply, _ = await self.call("forward_port", forward=number)
        return f"127.0.0.1:{reply['port']}"

    @contextmanager
    def serving(self, serve: Serve) -> Iterator[int]:
        """Give what serves streams in this process a number, for the agent's settings."""
        with self._tunnels.leading_to(serve) as number:
            yield number

    async def program(
        self, take: Callable[[bytes], None], begun: StartedEval, **header: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Run a program whose stdin and stdout are a stream; return what ``exec`` returns.

        Args:
            take: Gets what it writes on stdout.
            begun: Gets, at once, what writes to its stdin.
            header: As of ``exec``.
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
            raise ValueError(f"{len(text) + len(body)} bytes in one call, at most {MAX_FRAME}")
        self._writer.write(LENGTHS.pack(len(text), len(body)) + text + body)

    async def _listen(self) -> None:
        try:
            while True:
                head, body = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
                if head + body > MAX_FRAME:
                    raise ValueError(f"a frame of {head + body} bytes")
                header = json.loads(await self._reader.readexactly(head))
                self._take(header, await self._reader.readexactly(body) if body else b"")
        except (asyncio.IncompleteReadError, OSError):
            self._fail(f"the box is gone{await self._explain()}")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            self._fail(f"the box answered outside the protocol: {e}")

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
        """Let all calls end, now and later; the first reason stays."""
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
        raise ValueError(f"a target is host:port, got {text!r}")
    return host.strip("[]"), int(port)


def _said(error: Mapping[str, Any], op: str) -> Exception:
    """Return the error that the agent tells of."""
    number, message = error.get("errno"), str(error.get("message", ""))
    if isinstance(number, int):
        return OSError(number, message, error.get("filename"))
    return SandboxFailure(f"{error.get('type')}: {message}", boundary=f"sandbox.{op}")
