"""A client of one OpenAI-compatible server: JSON requests and responses, with retries.

    post -> [wait if the server has requested a pause] -> HTTP -> JSON
              ^   429, 5xx, no connection: after Retry-After, or with exponential backoff,
              +--------------------------------- at most num_retries times

Takes: a path below ``base_url`` and a body. Gives: the answer as JSON, or an
:class:`~rollart_core.errors.EndpointError` with the boundary that was crossed and the kind of
error, determined from the status and the body in any of the formats that servers use.
Never: shows the key, follows a redirect with it, or sends requests while the server has requested a
pause.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollart_core.errors import ConfigError, EndpointError, FaultKind, first_line

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState
    from tenacity.wait import wait_base

KEY_VARIABLE = "OPENAI_API_KEY"
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 16.0
MAX_ANSWER_BYTES = 64 * 2**20
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses for which a retry can succeed."""
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|max_model_len|maximum (model|input|sequence) length"
    r"|(prompt|input) is too long|too many tokens",
    re.IGNORECASE,
)
_OVERFLOW_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})


@dataclass(frozen=True, slots=True)
class EndpointServer:
    """The address of a server, and how to call it.

    Raises:
        ConfigError: If ``base_url`` is not the URL of a server, or contains a password.
    """

    base_url: str
    """The URL before ``/chat/completions``, such as ``http://127.0.0.1:8000/v1``."""
    api_key: str = field(default="", repr=False)
    """API key. Empty: no key is sent."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional headers."""
    connect_s: float = 10.0
    """Maximum time to establish a connection."""
    answer_s: float = 600.0
    """Maximum time for one answer."""
    num_retries: int = 6
    """Maximum number of retries of a request."""
    longest_wait_s: float = 120.0
    """Longest wait that a server can request; if it requests more, the request fails."""
    retry_lost: bool = True
    """Whether a request is retried if the connection was lost or could not be established."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"base_url {self.base_url!r} is not a server URL; use one such as "
                "http://127.0.0.1:8000/v1"
            )
        if parts.password or parts.username:
            shown = f"{parts.scheme}://***@{parts.hostname}"
            raise ConfigError(
                f"base_url {shown}: set the key in an environment variable, not in the URL"
            )

    def url(self, path: str) -> str:
        """Return the URL of a path below ``base_url``, or below the root if it begins with ``/``.

        In vLLM, ``/tokenize`` is next to ``/v1``, not below it.
        """
        if path.startswith("/"):
            parts = urlsplit(self.base_url)
            return f"{parts.scheme}://{parts.netloc}{path}"
        return f"{self.base_url.rstrip('/')}/{path}"


class EndpointClient:
    """A client with one connection pool; it belongs to the event loop in which it is used.

    Args:
        server: The server.

    Raises:
        ConfigError: If aiohttp is not installed.
    """

    def __init__(self, server: EndpointServer) -> None:
        if find_spec("aiohttp") is None:
            raise ConfigError("aiohttp is not installed: pip install 'rollart[gateway]'")
        self.server = server
        self.num_retried = 0
        """Number of retries so far."""
        self._http: Any = None
        self._quiet_until_s = 0.0

    async def get(self, path: str, *, num_retries: int | None = None) -> Any:
        """Return the JSON at a path.

        Args:
            path: Path below ``base_url``.
            num_retries: Maximum number of retries, if different from the server's.

        Raises:
            EndpointError: If the request fails.
        """
        return await self._ask("GET", path, None, num_retries)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a JSON object and return the object in the response.

        Raises:
            EndpointError: If the request fails, or the response is not an object.
        """
        answer = await self._ask("POST", path, body, None)
        if answer is None:  # some servers send an empty response
            return {}
        if not isinstance(answer, dict):
            raise self._malformed(path, "JSON that is not an object")
        return answer

    async def close(self) -> None:
        """Close all connections; requests in flight fail. Can be called twice."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, num_retries: int | None
    ) -> Any:
        most = self.server.num_retries if num_retries is None else num_retries
        try:
            return await self._once(method, path, body)
        except EndpointError as e:
            first: list[EndpointError] = [e]

        async def attempt() -> Any:
            if first:
                raise first.pop()
            return await self._once(method, path, body)

        # Only after a failure: the retry policy costs half as much CPU time as a request.
        return await self._retrying(most)(attempt)

    def _retrying(self, most: int) -> AsyncRetrying:
        """Return the retry policy of one request."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        wait_s = backoff()

        def advised_s(state: RetryCallState) -> float | None:
            error = state.outcome.exception() if state.outcome else None
            return error.wait_s if isinstance(error, EndpointError) else None

        def noted(state: RetryCallState) -> None:
            if (advice_s := advised_s(state)) is not None:  # the wait applies to all requests
                self._quiet_until_s = max(self._quiet_until_s, time.monotonic() + advice_s)
            self.num_retried += 1

        return AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_exception(self._is_worth_a_retry),
            stop=stop_after_attempt(most + 1),
            wait=lambda state: wait_s(state) if advised_s(state) is None else 0.0,
            before_sleep=noted,
            reraise=True,
        )

    def _is_worth_a_retry(self, error: BaseException) -> bool:
        if not isinstance(error, EndpointError) or not error.retryable:
            return False
        if error.kind == "unreachable" and not self.server.retry_lost:
            return False
        return error.wait_s is None or error.wait_s <= self.server.longest_wait_s

    async def _peace(self) -> None:
        """Wait while the server has requested a pause; the jitter spreads the requests."""
        while (left_s := self._quiet_until_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s + min(1.0, 0.1 * left_s) * random.random())

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import aiohttp

        await self._peace()
        where = self.server.url(path)
        try:
            async with self._session().request(
                method, where, json=body, allow_redirects=False
            ) as answer:
                content = await self._content(answer, where)
                status, headers = answer.status, dict(answer.headers)
        except TimeoutError as e:
            limit_s = self.server.answer_s
            raise EndpointError(
                f"{where} did not answer within {limit_s:g} s", kind="slow", retryable=True
            ) from e
        except (aiohttp.InvalidURL, ValueError) as e:
            raise ConfigError(f"base_url {self.server.base_url!r}: {first_line(str(e))}") from e
        except (aiohttp.ClientError, OSError) as e:
            cause = getattr(e, "os_error", e)  # of a failed connection
            number = getattr(cause, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else getattr(cause, "strerror", "")
            reason = reason or str(cause) or type(cause).__name__
            raise EndpointError(
                f"no server is reachable at {where} ({first_line(reason)})",
                kind="unreachable",
                retryable=True,
            ) from e
        if 300 <= status < 400:
            to = headers.get("Location", "elsewhere")
            message = f"{where} returned {status}, a redirect to {to}; correct base_url"
            raise EndpointError(message, kind="refused", status=status)
        if status >= 400:
            error = fault(status, content, where=where, secret=self.server.api_key)
            error.wait_s = requested_wait_s(headers, now_s=time.time())
            raise error
        if not content and status in (200, 204):
            return None
        try:
            return json.loads(content)
        except ValueError as e:
            raise self._malformed(path, "data that is not JSON") from e

    async def _content(self, answer: Any, where: str) -> bytes:
        found = bytearray()
        async for chunk in answer.content.iter_any():
            found += chunk
            if len(found) > MAX_ANSWER_BYTES:
                message = f"{where} returned more than {MAX_ANSWER_BYTES >> 20} MiB"
                raise EndpointError(message, kind="malformed")
        return bytes(found)

    def _malformed(self, path: str, what: str) -> EndpointError:
        message = (
            f"{self.server.url(path)} returned {what}; check base_url, which usually ends with /v1"
        )
        return EndpointError(message, kind="malformed")

    def _session(self) -> Any:
        import aiohttp

        if self._http is None:
            headers = dict(self.server.headers)
            if self.server.api_key:
                headers["Authorization"] = f"Bearer {self.server.api_key}"
            limits = aiohttp.ClientTimeout(
                total=self.server.answer_s, sock_connect=self.server.connect_s
            )
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=limits,
                trust_env=urlsplit(self.server.base_url).hostname not in _LOOPBACK,
            )
        return self._http


def fault(status: int, body: bytes, *, where: str, secret: str = "") -> EndpointError:
    """Return the error for an unsuccessful response.

    Args:
        status: HTTP status, 300 or more.
        body: Body of the response.
        where: The requested URL.
        secret: An API key, which some servers repeat; it is removed from the message.
    """
    said, codes = _said(body)
    if secret:
        said = said.replace(secret, "***")
    kind = _kind(status, said, codes)
    message = f"{where} returned {status}" + (f": {said}" if said else "")
    again = status in AGAIN and kind != "quota"
    return EndpointError(message, kind=kind, status=status, retryable=again)


def _kind(status: int, said: str, codes: set[str]) -> FaultKind:
    if codes & _SPENT or status == 402:
        return "quota"
    if status in (401, 403):
        return "key"
    if status in (400, 413, 422) and (codes & _OVERFLOW_CODES or _OVERFLOW.search(said)):
        return "overflow"
    if status == 404:
        return "missing"
    if status == 429:
        return "rate"
    return "refused" if status < 500 else "server"


def _said(body: bytes) -> tuple[str, set[str]]:
    """Return the message of an error body and its codes.

    Bodies are ``{"error": {"message", "type", "code"}}`` (OpenAI), the same without ``error``
    (older vLLM), ``{"detail": ...}`` (FastAPI), or text.
    """
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)
    except ValueError:
        return first_line(re.sub(r"<[^>]*>", " ", text)), set()
    if not isinstance(found, Mapping):
        return first_line(text), set()
    inner = found.get("error")
    if isinstance(inner, str):
        return first_line(inner), set()
    fields = inner if isinstance(inner, Mapping) else found
    message = fields.get("message", fields.get("detail", ""))
    codes = {str(fields[k]) for k in ("code", "type") if fields.get(k) is not None}
    return first_line(message if isinstance(message, str) else json.dumps(message)), codes


def key_from(variable: str | None) -> str:
    """Return the API key in an environment variable.

    Args:
        variable: Name of the variable. None: ``OPENAI_API_KEY``, or no key if it is not set.

    Raises:
        ConfigError: If the named variable is not set.
    """
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"api_key_env: the environment variable {variable} is not set")
    return os.environ.get(variable or KEY_VARIABLE, "")


def requested_wait_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Return the wait that a server requests, or None if it requests none.

    ``Retry-After`` is in seconds or a date (RFC 9110, 10.2.3). Some servers also send the more
    precise ``retry-after-ms``.

    Args:
        headers: Headers of the response, spelled as in the RFC or in lower case.
        now_s: Seconds since the epoch.
    """
    given = headers.get("retry-after-ms")
    milliseconds = _number(given)
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("Retry-After") or headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def backoff() -> wait_base:
    """Return the wait after a failed attempt, if the server does not request one.

    A random half prevents clients that failed at the same time from retrying at the same time.
    """
    from tenacity import wait_exponential, wait_random_exponential

    half = {"multiplier": FIRST_WAIT_S / 2, "max": LONGEST_WAIT_S / 2}
    return wait_exponential(**half) + wait_random_exponential(**half)


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
