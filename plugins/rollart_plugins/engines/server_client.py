"""The HTTP connection to one inference server.

Takes: paths and JSON bodies. Gives: the server's JSON, or its text if the response is not JSON.
Never: retries, because only the caller can decide whether this is safe.
"""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from rollart_core.errors import EngineDied, InferenceFailure, first_line
from rollart_plugins.engines.server_answers import Json

CONTROL_S = 60.0
"""Maximum time for a response that needs no computation."""
IDLE_S = 2.0
"""A connection that is idle for longer is not used again. The servers close theirs after 5 s."""


class ServerRefusal(InferenceFailure):
    """A response of a server that is not a success; ``status`` is its HTTP status."""

    status: int = 0


class ServerClient:
    """A client of one server.

    Args:
        url: Its address, such as ``http://127.0.0.1:30000``.
        api_key: Key that is sent with every request. Empty: no key.
        server: The name of the server's program, for errors.
    """

    def __init__(self, url: str, api_key: str = "", server: str = "inference") -> None:
        self.url, self.server = url, server
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, limit_s: float = CONTROL_S) -> Any:
        """Return the JSON at a path; see :meth:`post` for the errors."""
        return await self._ask("GET", path, None, limit_s)

    async def post(
        self, path: str, body: Json | bytes | None = None, *, limit_s: float | None = CONTROL_S
    ) -> Any:
        """Send a JSON body and return the JSON of the response.

        Encode large bodies in a thread before: meanwhile, this event loop would not notice that the
        server closes its connection.

        Raises:
            EngineDied: If the connection cannot be established, or is lost.
            ServerRefusal: If the server rejects the request (not retryable), or fails.
            TimeoutError: If the response does not arrive in time; a ``limit_s`` of None is no
                limit.
        """
        return await self._ask("POST", path, body or {}, limit_s)

    async def alive(self, *, limit_s: float) -> bool:
        """Return whether the server is healthy."""
        try:
            await self.get("/health", limit_s=limit_s)
        except (EngineDied, InferenceFailure, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Close the connections; can be called twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(
        self, method: str, path: str, body: Json | bytes | None, limit_s: float | None
    ) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONTROL_S)
        # a file object is sent in pieces, which suits large weights
        encoded = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        data = None if encoded is None else io.BytesIO(encoded)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=limit
            ) as response:
                text = await response.text()
                status = response.status
        except TimeoutError as e:  # aiohttp's timeout errors are TimeoutErrors
            raise TimeoutError(f"{self.url}{path} did not answer within {limit_s} s") from e
        except (aiohttp.ClientError, OSError) as e:
            why = first_line(str(e)) or type(e).__name__
            message = f"the {self.server} server at {self.url} is not reachable: {why}"
            raise EngineDied(message, boundary=self.server.lower()) from e
        if status == 200:
            return _json(text)
        error = ServerRefusal(
            f"the {self.server} server at {self.url} answers {path} with {status}: {_reason(text)}",
            boundary=self.server.lower(),
        )
        error.status, error.retryable = status, status >= 500
        raise error


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _reason(text: str) -> str:
    """Return the message of an error response, in any of the server's formats."""
    said = _json(text)
    for key in ("error", "message"):
        if isinstance(said, dict):
            said = said.get(key, said)
    return first_line(said if isinstance(said, str) else str(said))
