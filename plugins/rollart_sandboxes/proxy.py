"""The HTTP proxy through which a sandbox reaches the hosts that its config allows, and no others.

Takes: connections from a sandbox: ``CONNECT``, and requests with an absolute ``http://`` target.
Gives: bytes in both directions, or a refusal in plain text. Never: connects to an address that is
not public (unless the config names that address), or inspects the content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

from rollart_sandboxes import network

PORT: Final = 3128
"""The proxy's port in a sandbox, on its loopback."""
MOST: Final = 64
"""Maximum concurrent connections of one sandbox."""
HEAD_BYTES: Final = 1 << 16
HEAD_S: Final = 30.0
CONNECT_S: Final = 20.0
IDLE_S: Final = 300.0
_CHUNK: Final = 1 << 16
_REQUEST: Final = re.compile(r"([A-Z]{1,20}) (\S+) HTTP/1\.[01]")
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:.*")
_OURS: Final = ("host", "connection", "keep-alive", "upgrade")
_log: Final = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[list[str]]]


class Refused(Exception):
    """A request that the proxy itself answers, with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def resolve(name: str, port: int) -> list[str]:
    """Return the addresses of a name.

    Raises:
        OSError: If it has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class Proxy:
    """The proxy of one sandbox.

    Args:
        names: The allowed hosts, in the format of :func:`network.rule`.
        resolve: Returns the addresses of a name.
    """

    def __init__(self, names: Iterable[str], *, resolve: Resolve = resolve) -> None:
        self._rules = [network.rule(name) for name in names]
        self._resolve = resolve
        self._live = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from the sandbox until it ends."""
        self._live += 1
        try:
            if self._live > MOST:
                raise Refused(503, f"the sandbox has more than {MOST} connections")
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._carry(head, reader, writer)
        except Refused as e:
            _log.info("refused: %s", e)
            writer.write(_answer(e.status, str(e)))
        except asyncio.LimitOverrunError:
            writer.write(_answer(431, f"the head of the request is over {HEAD_BYTES} bytes"))
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass
        finally:
            self._live -= 1
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    async def _carry(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port, first = _read(head)
        far_reader, far_writer = await self._connect(host, port)
        try:
            if first:
                far_writer.write(first)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _carry_both((reader, far_writer), (far_reader, writer))
        finally:
            far_writer.close()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to one of a host's addresses, if it is allowed."""
        where = _where(host, port)
        if not network.allowed(self._rules, host, port):
            named = ", ".join(map(str, self._rules))
            raise Refused(403, f"the sandbox may not reach {where}; it may reach: {named}")
        why = "it has no address"
        try:
            async with asyncio.timeout(CONNECT_S):
                for found in await self._addresses(host, port):
                    try:
                        return await asyncio.open_connection(found, port, limit=HEAD_BYTES)
                    except TimeoutError:
                        raise
                    except ConnectionError:
                        why = "the server refused the connection"
                    except OSError as e:  # one address may be unreachable while the next one is not
                        why = e.strerror or str(e)
        except TimeoutError:
            raise Refused(504, f"{where} does not answer within {CONNECT_S:g} s") from None
        except OSError as e:
            raise Refused(502, f"{where} cannot be reached: {e.strerror or e}") from None
        raise Refused(502, f"{where} cannot be reached: {why}")

    async def _addresses(self, host: str, port: int) -> list[str]:
        if network.address(host) is not None:  # the config allows this exact address
            return [host]
        found = await self._resolve(host, port)
        parsed = [network.address(each.partition("%")[0]) for each in found]
        public = [str(each) for each in parsed if each is not None and network.public(each)]
        if not public:
            message = f"the sandbox may not reach {host}:{port}: its address is not public"
            raise Refused(403, message)
        return public


def _read(head: bytes) -> tuple[str, int, bytes]:
    """Return the host and port of a request, and what the server is sent; empty for CONNECT."""
    line, *headers = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _REQUEST.fullmatch(line)
    if found is None or not all(_HEADER.fullmatch(header) for header in headers):
        raise Refused(400, "this is not an HTTP/1.1 request")
    method, target = found[1], found[2]
    try:
        if method == "CONNECT":
            host, port = network.split(target)
            if port is None:
                raise ValueError
            return host, port, b""
        parts = urlsplit(target)
        if parts.scheme != "http":
            raise ValueError
        host, port = network.split(parts.netloc.rpartition("@")[2])
    except ValueError:
        raise Refused(400, "this proxy accepts CONNECT host:port and http:// targets") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [h for h in headers if not _is_ours(h.partition(":")[0].lower())]
    lines = [f"{method} {path} HTTP/1.1", f"Host: {_where(host, port)}", "Connection: close", *kept]
    return host, 80 if port is None else port, "\r\n".join([*lines, "", ""]).encode("latin-1")


def _where(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _is_ours(header: str) -> bool:
    return header in _OURS or header.startswith("proxy-")


def _answer(status: int, message: str) -> bytes:
    """Return a refusal. Clients show its first line, and some show only that line."""
    message = re.sub(r"[^ -~]", "?", message)
    body = f"rollart: {message}\n".encode()
    head = f"HTTP/1.1 {status} {message}\r\nContent-Type: text/plain\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class _Seen:
    """The time at which bytes last moved in either direction."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now()

    def now(self) -> None:
        self._at = self._loop.time()

    async def idle(self) -> None:
        """Return once no bytes have moved in either direction for ``IDLE_S`` seconds."""
        while (left := self._at + IDLE_S - self._loop.time()) > 0:
            await asyncio.sleep(left)


async def _carry_both(*pipes: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy bytes in both directions until both have ended, one fails, or nothing moves."""
    seen = _Seen()
    idle = asyncio.create_task(seen.idle())
    carried = [asyncio.create_task(_carry_one(*pipe, seen)) for pipe in pipes]
    waiting = {idle, *carried}
    try:
        while waiting != {idle}:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if idle in done or any(task.exception() for task in done):
                return
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(idle, *carried, return_exceptions=True)


async def _carry_one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: _Seen
) -> None:
    while data := await reader.read(_CHUNK):
        seen.now()
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
