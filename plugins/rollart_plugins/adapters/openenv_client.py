"""OpenEnv's protocol (0.10): a WebSocket session for episodes, plain HTTP for schemas and metadata.

A session is one environment on the server, from the first reset until the socket closes. Each
message ``{"type": "reset" | "step", "data"}`` has one answer ``{"type": "observation" | "error",
"data"}``. All sessions of a process share one thread with an event loop, which ends with the last
session. Therefore sessions answer pings while the policy generates, and work for callers with or
without an event loop.

Takes: the address of a server. Gives: answers, or errors that name the boundary that was crossed.
Never: reuses a socket on which an answer is still pending.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from rollart_core.errors import DeadlineFailure, EnvironmentFailure, PluginError, first_line
from rollart_core.rollout.loop import LoopThread

CLOSE_S = 2.0
"""Maximum time to close a session."""
HEARTBEAT_S = 20.0
MAX_MESSAGE_BYTES = 100 * 2**20
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Server:
    """Address and time limits of a server."""

    url: str
    headers: Mapping[str, str]
    connect_s: float
    message_s: float


class InvalidAction(ValueError):
    """An invalid action, with a message for the policy."""

    def __init__(self, message: str, *, raised: bool = False) -> None:
        """Create the error; ``raised``: the environment's own code on the server raised it."""
        super().__init__(message)
        self.raised = raised


def fetch(server: Server, path: str, *, missing: Any = None) -> Any:
    """Return the JSON at a path of a server.

    Args:
        server: The server.
        path: Path of the URL, such as ``/schema``.
        missing: Value for a path that does not exist (404). None: this is an error.

    Raises:
        PluginError: If the server is not reachable, or the answer is not JSON.
    """
    if find_spec("aiohttp") is None:
        raise PluginError(
            "aiohttp is not installed, and openenv requires it: pip install 'aiohttp'"
        )
    local = urlsplit(server.url).hostname in _LOOPBACK
    proxies = [urllib.request.ProxyHandler({})] if local else []
    request = urllib.request.Request(server.url + path, headers=dict(server.headers))
    try:
        opener = urllib.request.build_opener(*proxies)
        with opener.open(request, timeout=server.connect_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == 404 and missing is not None:
            return missing
        raise PluginError(f"{server.url}{path} returned {e.code} {e.reason}") from e
    except OSError as e:
        reason = getattr(e, "reason", None) or e
        raise PluginError(
            f"no OpenEnv server is reachable at {server.url} ({reason}): start it, or correct "
            "base_url"
        ) from e
    except ValueError as e:
        raise PluginError(
            f"{server.url}{path} did not return JSON; it must be an OpenEnv server"
        ) from e


class _IoThread:
    """The I/O thread of all sessions of this process, with one aiohttp session."""

    def __init__(self) -> None:
        self.http: Any = None
        self._loop = LoopThread("rollart-openenv")
        self.submit = self._loop.submit

    def end(self) -> None:
        """Stop the loop and wait for the thread."""
        self._loop.close(self._hang_up, wait_s=None)

    async def session(self) -> Any:
        """Return the HTTP session."""
        import aiohttp

        if self.http is None:
            self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self.http

    async def _hang_up(self) -> None:
        if self.http is not None:
            await self.http.close()


class _IoThreads:
    """Reference-counted I/O thread of this process; the last user ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[_IoThread, int]] = {}

    def lend(self) -> _IoThread:
        with self._lock:
            thread, users = self._lent.get(os.getpid(), (None, 0))
            thread = thread or _IoThread()
            self._lent[os.getpid()] = (thread, users + 1)
            return thread

    def take_back(self) -> None:
        with self._lock:
            thread, users = self._lent.pop(os.getpid())
            if users > 1:
                self._lent[os.getpid()] = (thread, users - 1)
                return
            thread.end()


_threads = _IoThreads()


class _Gone(Exception):
    """The socket closed."""


@dataclass(slots=True)
class _Socket:
    """An open WebSocket and its reader task."""

    ws: Any
    inbox: asyncio.Queue[str | None]
    reader: asyncio.Task[None]


class Client:
    """One session of a server. If the session was lost, the next reset starts a new one."""

    def __init__(self, server: Server) -> None:
        """Create a client; it connects at the first reset."""
        self._server = server
        self._io: _IoThread | None = None
        self._socket: _Socket | None = None
        self._closed = False

    def call(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the data of the answer.

        Raises:
            InvalidAction: If the server did not accept a step, or raised in it.
            EnvironmentFailure: If the server or the connection failed.
            DeadlineFailure: If the answer did not arrive in time.
        """
        answer: Mapping[str, Any] = self._submit(kind, data).result()
        return answer

    async def acall(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """As :meth:`call`; cancellation drops the session."""
        answer: Mapping[str, Any] = await asyncio.wrap_future(self._submit(kind, data))
        return answer

    def close(self) -> None:
        """End the session; can be called twice."""
        self._closed = True
        io, self._io = self._io, None
        if io is None:
            return
        with suppress(Exception):  # a server that is gone has no session to end
            io.submit(self._drop(politely=True)).result(2 * CLOSE_S)
        _threads.take_back()

    def _submit(self, kind: str, data: Mapping[str, Any]) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the environment is closed")
        if self._io is None:
            self._io = _threads.lend()
        return self._io.submit(self._exchange(kind, data, self._io))

    async def _exchange(self, kind: str, data: Mapping[str, Any], io: _IoThread) -> Any:
        what = f"env.{kind}"
        try:
            return await self._asked(kind, data, io)
        except TimeoutError as e:
            await self._drop()
            wait = f"{self._server.url} did not answer within {self._server.message_s:g} s"
            raise DeadlineFailure(f"{what}: {wait}", boundary=what) from e
        except _Gone as e:
            await self._drop()
            raise EnvironmentFailure(f"{what}: {e}", boundary=what) from e
        except asyncio.CancelledError:
            # The answer can still arrive, and would be used as the answer to the next message.
            await self._drop()
            raise

    async def _asked(self, kind: str, data: Mapping[str, Any], io: _IoThread) -> Any:
        socket = self._socket
        if kind == "reset" and socket is not None:
            with suppress(_Gone):  # the server can have ended an idle session
                return _data(await self._round_trip(socket, kind, data), kind, self._server)
            await self._drop()
        if kind == "reset":
            socket = self._socket = await self._connect(io)
        if socket is None:
            raise _Gone("there is no session: call reset() first")
        return _data(await self._round_trip(socket, kind, data), kind, self._server)

    async def _round_trip(self, socket: _Socket, kind: str, data: Mapping[str, Any]) -> Any:
        # A rejected session receives an error before the first message; the error is still read.
        with suppress(ConnectionError):
            await socket.ws.send_str(json.dumps({"type": kind, "data": data}))
        async with asyncio.timeout(self._server.message_s):
            raw = await socket.inbox.get()
        if raw is None:
            code = socket.ws.close_code
            raise _Gone(f"{self._server.url} closed the session (code {code})")
        return json.loads(raw)

    async def _connect(self, io: _IoThread) -> _Socket:
        import aiohttp

        http = await io.session()
        url = f"{self._server.url.replace('http', 'ws', 1)}/ws"
        try:
            async with asyncio.timeout(self._server.connect_s):
                ws = await http.ws_connect(
                    url,
                    headers=self._server.headers,
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MAX_MESSAGE_BYTES,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            reason = first_line(str(e)) or f"timeout after {self._server.connect_s:g} s"
            raise _Gone(f"no connection to {self._server.url}: {reason}") from e
        inbox: asyncio.Queue[str | None] = asyncio.Queue()
        return _Socket(ws, inbox, asyncio.create_task(_read(ws, inbox)))

    async def _drop(self, *, politely: bool = False) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                if politely:
                    await socket.ws.send_str('{"type": "close"}')
                await socket.ws.close()
        socket.reader.cancel()
        with suppress(asyncio.CancelledError):
            await socket.reader


async def _read(ws: Any, inbox: asyncio.Queue[str | None]) -> None:
    """Read until the socket closes; reading also answers the server's pings."""
    try:
        async for message in ws:
            inbox.put_nowait(message.data)
    finally:
        inbox.put_nowait(None)


def _data(answer: Any, kind: str, server: Server) -> Any:
    """Return the data of an answer, or raise its error."""
    data = answer.get("data") or {}
    if answer.get("type") != "error":
        return data
    code, message = data.get("code"), first_line(str(data.get("message", "")))
    if code == "CAPACITY_REACHED":
        most = data.get("max_sessions")
        raise _Gone(
            f"{server.url}: all {most} sessions are in use; raise its max_concurrent_envs, or "
            "lower rollout.max_concurrent"
        )
    if kind == "step" and code == "VALIDATION_ERROR":
        faults = [str(fault.get("msg", "")) for fault in data.get("errors") or ()]
        raise InvalidAction(f"Invalid action: {'; '.join(faults) or message}")
    if kind == "step" and code == "EXECUTION_ERROR":
        raise InvalidAction(f"Error: {message}", raised=True)
    raise EnvironmentFailure(f"env.{kind}: {server.url}: {message} ({code})")
