"""A client for the part of the Docker Engine API that sandboxes need, on asyncio streams.

Takes: an address as in ``DOCKER_HOST``. Gives: answers as JSON, and the raw streams of an attached
container. Never: starts a process, holds a thread, or limits the number of concurrent streams.

The streams are those of asyncio, with its flow control, because hundreds of sandboxes use one each.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from rollart_core.errors import SandboxFailure

_LIMIT: Final = 1 << 20
_TIMEOUT_S: Final = 60.0
_INSTEAD: Final = "or use the sandbox bubblewrap, which needs no engine"

_answered: set[str] = set()
"""Engines that have answered this process; such an engine may come back if it is gone."""


class EngineError(SandboxFailure):
    """The engine refused a request.

    Args:
        status: Its HTTP status.
        said: Its reason.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the Docker engine says: {said}", boundary="sandbox.docker")
        self.status = status
        self.said = said


class Engine:
    """The engine at one address.

    Args:
        host: ``unix:///path`` or ``tcp://host:port``; empty: see :func:`usual_host`.
        timeout_s: Maximum seconds for an answer, unless a request sets another limit.

    Raises:
        SandboxFailure: If the address has another form.
    """

    def __init__(self, host: str = "", *, timeout_s: float = _TIMEOUT_S) -> None:
        self.host = host or usual_host()
        self._timeout_s = timeout_s
        self._at = urlsplit(self.host)
        is_tcp = self._at.scheme in {"tcp", "http", "https"} and self._at.hostname
        if not is_tcp and not (self._at.scheme == "unix" and self._at.path):
            message = (
                f"{self.host!r} is not an address of a Docker engine: use unix:///path or "
                "tcp://host:port (for an engine behind ssh, forward its socket with `ssh -L`)"
            )
            raise unfit(message)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the engine's answer, parsed from JSON; a stream of JSON lines becomes a list.

        Raises:
            EngineError: If the engine refuses the request.
            SandboxFailure: If it does not answer.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(method, path + _query(query), body)
        except TimeoutError as e:
            message = f"the Docker engine at {self.host} did not answer within {timeout_s:g} s"
            raise SandboxFailure(message, boundary="sandbox.docker") from e

    async def attach(self, container: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the stdin and (as frames) the stdout and stderr of a container, as one stream."""
        query = _query({"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1})
        reader, writer = await self._connect()
        try:
            head = {"Connection": "Upgrade", "Upgrade": "tcp"}
            path = f"/containers/{container}/attach{query}"
            writer.write(_request(f"POST {path} HTTP/1.1", head, b""))
            async with asyncio.timeout(self._timeout_s):
                status = await self._head(reader)
                if status not in {101, 200}:
                    raise EngineError(status, _said(await reader.read(_LIMIT)))
        except BaseException as e:
            writer.close()
            if isinstance(e, OSError | TimeoutError | EOFError):
                raise self._gone(e) from e
            raise
        return reader, writer

    async def _ask(self, method: str, path: str, body: object) -> Any:
        reader, writer = await self._connect()
        content = b"" if body is None else json.dumps(body).encode()
        try:
            # HTTP/1.0: the answer ends with the connection, in one piece.
            line = f"{method} {path} HTTP/1.0"
            writer.write(_request(line, {"Content-Type": "application/json"}, content))
            status = await self._head(reader)
            answer = await reader.read()
        except (OSError, EOFError) as e:
            raise self._gone(e) from e
        finally:
            writer.close()
        if status >= 300 and status != 304:
            raise EngineError(status, _said(answer))
        return _parsed(answer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if self._at.scheme == "unix":
                return await asyncio.open_unix_connection(self._at.path, limit=_LIMIT)
            port = self._at.port or (2376 if _wants_tls() else 2375)
            tls = _tls() if _wants_tls() or self._at.scheme == "https" else None
            return await asyncio.open_connection(self._at.hostname, port, limit=_LIMIT, ssl=tls)
        except PermissionError as e:
            message = (
                f"no permission for the Docker engine's socket {self._at.path}: join its group "
                f"(`usermod -aG docker NAME`, then log in again), {_INSTEAD}"
            )
            raise unfit(message) from e
        except OSError as e:
            raise self._gone(e) from e

    async def _head(self, reader: asyncio.StreamReader) -> int:
        """Read the head of an answer; return its status."""
        head = await reader.readuntil(b"\r\n\r\n")
        fields = head.split(b" ", 2)
        if len(fields) < 3 or not fields[1].isdigit():
            raise unfit(f"the server at {self.host} is not a Docker engine: set DOCKER_HOST")
        _answered.add(self.host)
        return int(fields[1])

    def _gone(self, error: Exception) -> SandboxFailure:
        why = (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
        message = (
            f"no Docker engine answers at {self.host} ({why}): start it, or set DOCKER_HOST, "
            f"{_INSTEAD}"
        )
        if self.host in _answered:
            return SandboxFailure(message, boundary="sandbox.docker")
        return unfit(message)


def usual_host() -> str:
    """Return ``DOCKER_HOST``, or the socket of the system's or the user's engine."""
    if named := os.environ.get("DOCKER_HOST"):
        return named
    system = Path("/var/run/docker.sock")
    own = [Path.home() / ".docker/run/docker.sock", Path.home() / ".docker/desktop/docker.sock"]
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        own.insert(0, Path(folder, "docker.sock"))
    return f"unix://{next((path for path in (system, *own) if path.exists()), system)}"


def unfit(message: str) -> SandboxFailure:
    """Return a failure that a retry cannot fix."""
    failure = SandboxFailure(message, boundary="sandbox.docker")
    failure.retryable = False
    return failure


def _request(line: str, head: Mapping[str, str], content: bytes) -> bytes:
    fields = {"Host": "docker", **head, "Content-Length": str(len(content))}
    lines = [line, *(f"{key}: {value}" for key, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _query(query: Mapping[str, object] | None) -> str:
    if not query:
        return ""
    values = {k: v if isinstance(v, str | int) else json.dumps(v) for k, v in query.items()}
    return "?" + urlencode(values)


def _parsed(answer: bytes) -> Any:
    try:
        return json.loads(answer) if answer.strip() else None
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in answer.splitlines() if line.strip()]
    except ValueError as e:
        raise EngineError(200, f"{answer[:100]!r}, which is not JSON") from e


def _said(answer: bytes) -> str:
    """Return the reason in an answer."""
    try:
        said = json.loads(answer)["message"]
    except (ValueError, KeyError, TypeError):
        said = answer[:300].decode(errors="replace")
    return str(said).strip() or "no reason given"


def _wants_tls() -> bool:
    return bool(os.environ.get("DOCKER_TLS_VERIFY"))


def _tls() -> ssl.SSLContext:
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
