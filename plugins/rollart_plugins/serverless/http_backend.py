"""The `http` backend: any function that accepts the wire's calls by POST.

Takes: calls. Gives: answers of the server at ``url``: `rollart serve-reward` on this machine or in
a container, or a user's function with the wire protocol.
Never: follows a redirect with its token, reads more of an answer than the limit, or accepts an
error page as a score.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rollart_core.errors import BackendFailure, ConfigError, first_line
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.config import NO_AIOHTTP, HttpConfig
from rollart_plugins.serverless.remote import RemoteBackend, Sent

if TYPE_CHECKING:
    import aiohttp

_KNOWN = {
    401: "it rejects the token; set token_env to the variable with the function's token",
    403: "it rejects the token; set token_env to the variable with the function's token",
    404: "there is no function at this URL",
    405: "this URL does not accept POST",
    413: "the call is above its size limit",
}


class HttpBackend(RemoteBackend[HttpConfig]):
    """Calls a function over HTTP."""

    name = "http"
    config_model = HttpConfig

    def prepare(self) -> None:
        """Read the token; connections are opened later."""
        config = self.config
        self._token = self.secret(config.token_env) if config.token_env else ""
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Send a call without requests to the function.

        Raises:
            ConfigError: If it is not reachable, serves another reward, or rejects the token.
        """
        if self.config.check:
            await self.probe(f"start it with `rollart serve-reward {self.reward.id}`")

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Post a call.

        Raises:
            BackendFailure: If the function is not reachable, or its response is not an answer.
        """
        import aiohttp

        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        limit = aiohttp.ClientTimeout(total=deadline_s)
        try:
            try:
                answer = await self._post(body, headers, limit)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A kept-alive connection that the server has closed.
                answer = await self._post(body, headers, limit)
        except (aiohttp.ClientError, OSError) as e:
            if isinstance(e, TimeoutError):
                raise
            raise BackendFailure(f"{self._where()}: {_reason(e)}") from e
        return Sent(answer, memory_gb=self.config.memory_gb)

    async def _post(
        self, body: bytes, headers: dict[str, str], limit: aiohttp.ClientTimeout
    ) -> bytes:
        async with self._session().post(
            self.config.url, data=body, headers=headers, timeout=limit, allow_redirects=False
        ) as got:
            answer = await self._read(got)
            if got.status != 200:
                raise _failure_of(got.status, answer, got.headers.get("Retry-After"))
        return answer

    async def close(self) -> None:
        """Close the connections; can be called twice."""
        await super().close()
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise self._is_closed()
        if self._http is None:
            try:
                import aiohttp
            except ModuleNotFoundError as e:
                raise ConfigError(NO_AIOHTTP) from e
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connector = aiohttp.TCPConnector(limit=self.config.max_concurrent + 1)
            self._http = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._http

    async def _read(self, got: aiohttp.ClientResponse) -> bytes:
        """Read an answer, up to the size limit."""
        most = self.config.max_answer_bytes
        body = bytearray()
        async for chunk in got.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > most:
                got.close()
                raise BackendFailure(f"{self._where()}: its answer is larger than {most} bytes")
        return bytes(body)

    def _where(self) -> str:
        return self.config.url.partition("?")[0]


def _failure_of(status: int, body: bytes, retry_after: str | None) -> BackendFailure:
    """Return the error for a status, and whether a retry can succeed."""
    try:
        raw = json.loads(body)
    except ValueError:
        raw = None
    error = raw.get("error") if isinstance(raw, dict) else None
    if isinstance(error, dict) and isinstance(error.get("kind"), str):  # errors of gateways differ
        return wire.refusal(raw)
    again = status in (408, 425, 429) or status >= 500
    what = _KNOWN.get(status) or (
        "it is overloaded" if status == 429 else f"it returned {first_line(repr(body[:80]), 100)}"
    )
    wait_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    return BackendFailure(f"status {status}: {what}", again=again, wait_s=wait_s)


def _reason(error: Exception) -> str:
    return first_line(str(error)) or type(error).__name__
