"""Tools of a server with the Model Context Protocol over stdin and stdout.

Takes: a command. Gives: :class:`McpTools`, a tool source. Never: imports ``mcp`` (the extra
``mcp``) before a server is started, or leaves its process running.

An error of a tool is returned to the policy. A server that does not start, ends, or does not
respond in time is not an error of the policy: this raises, and fails the episode.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from rollart_core.errors import ConfigError, first_line
from rollart_core.rollout import loop
from rollart_core.rollout.tools.source import ToolError
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import ToolSpec

if TYPE_CHECKING:
    from mcp import ClientSession, StdioServerParameters

T = TypeVar("T")
_INVALID_PARAMS, _METHOD_NOT_FOUND = -32602, -32601
"""JSON-RPC codes of errors of the caller."""
_MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to start a server, and which of its tools to use."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to ``PATH``, ``HOME`` and similar ones. No others of this
    process are passed on."""
    cwd: str | None = None
    prefix: str = ""
    """Prefix of the names of its tools, to distinguish tools of several servers with the same
    name."""
    only: Sequence[str] | None = None
    """Names of the tools to offer, without the prefix. None: all."""
    start_s: float = 30.0
    """Maximum seconds until the server returns its tools."""
    call_s: float = 60.0
    """Maximum seconds for one call."""


class McpTools:
    """The tools of one server, whose process starts at the first use.

    Thread-safe.

    Args:
        server: The server.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._tools: tuple[ToolSpec, ...] = ()

    def tools(self) -> Sequence[ToolSpec]:
        """Return the tools of the server, under the names that the policy sees.

        Raises:
            ConfigError: If ``mcp`` is not installed, or a name in ``only`` is not one of its tools.
            RuntimeError: If the server does not start, with the last line of its stderr.
        """
        self._started()
        return self._tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its text; other content is replaced by a note.

        Raises:
            ToolError: The error that the tool, or the server for this call, returns.
            RuntimeError: If the server has ended.
            TimeoutError: After ``call_s``.
        """
        from mcp import MCPError

        session = self._started()
        own = name.removeprefix(self._server.prefix)
        try:
            answer = session.run(session.call(own, dict(arguments)), self._server.call_s)
        except MCPError as e:
            if e.code in (_INVALID_PARAMS, _METHOD_NOT_FOUND):
                raise ToolError(first_line(e.message)) from e
            raise RuntimeError(f"{self._server.command}: {first_line(e.message)}") from e
        if answer.get("isError"):
            raise ToolError(_text(answer))
        return _text(answer)

    def close(self) -> None:
        """Stop the server; can be called twice. The next use starts a new process."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _started(self) -> _Session:
        with self._lock:
            if self._session is None:
                session = _Session(_parameters(self._server))
                try:
                    listed = session.run(session.started(), self._server.start_s)
                    self._tools = _specs(listed, self._server)
                except BaseException as e:
                    why = session.said() or first_line(str(e)) or type(e).__name__
                    session.close()
                    if isinstance(e, ConfigError) or not isinstance(e, Exception):
                        raise
                    command = self._server.command
                    raise RuntimeError(f"MCP server {command!r} did not start: {why}") from e
                self._session = session
            return self._session


class _Session:
    """One running server; a single task opens and closes it, as ``mcp`` requires."""

    def __init__(self, parameters: StdioServerParameters) -> None:
        self._parameters = parameters
        self._stderr = TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in close()
        self._opened: Future[ClientSession] = Future()
        self._closing = asyncio.Event()
        self._life = loop.submit(self._live())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the event loop of the server and wait for its result."""
        return loop.run(asyncio.wait_for(work, timeout_s))

    async def started(self) -> list[dict[str, Any]]:
        """Wait until the server is ready, and return its tools as it describes them."""
        from mcp.types import PaginatedRequestParams

        session = await asyncio.wrap_future(self._opened)
        listed: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params = PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await session.list_tools(params=params)
            listed += [tool.model_dump(by_alias=True, mode="json") for tool in page.tools]
            cursor = page.next_cursor
            if not cursor:
                return listed
        raise RuntimeError(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool."""
        if self._life.done():
            raise RuntimeError(f"{self._parameters.command}: the server has ended")
        session = await asyncio.wrap_future(self._opened)
        answer = await session.call_tool(name, arguments)
        return answer.model_dump(by_alias=True, mode="json")

    def said(self) -> str:
        """Return the last line of the server's stderr."""
        with suppress(OSError, ValueError):
            self._stderr.seek(0)
            lines = [line for line in self._stderr.read()[-10_000:].splitlines() if line.strip()]
            return first_line(lines[-1]) if lines else ""
        return ""

    def close(self) -> None:
        """Stop the process and wait for its end."""

        async def end() -> None:
            self._closing.set()

        loop.run(end())
        with suppress(Exception):
            self._life.result()
        self._stderr.close()

    async def _live(self) -> None:
        from mcp import ClientSession, stdio_client

        try:
            async with (
                stdio_client(self._parameters, errlog=self._stderr) as (read, write),
                ClientSession(read, write) as session,
            ):
                opening = asyncio.ensure_future(session.initialize())
                closing = asyncio.ensure_future(self._closing.wait())
                try:
                    await asyncio.wait([opening, closing], return_when=asyncio.FIRST_COMPLETED)
                    if opening.done():
                        opening.result()
                        self._opened.set_result(session)
                    await closing
                finally:
                    opening.cancel()
                    closing.cancel()
        except BaseException as e:
            if not self._opened.done():
                self._opened.set_exception(_first_of(e))
            if not isinstance(e, Exception):
                raise
        finally:
            if not self._opened.done():
                self._opened.set_exception(RuntimeError("closed before it was ready"))


def _first_of(error: BaseException) -> BaseException:
    """Return the first error inside a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _parameters(server: McpServer) -> StdioServerParameters:
    try:
        from mcp import StdioServerParameters
    except ImportError as e:
        raise ConfigError("MCP servers require the extra mcp: pip install 'rollart[mcp]'") from e
    return StdioServerParameters(
        command=server.command, args=list(server.args), env=dict(server.env), cwd=server.cwd
    )


def _specs(listed: Sequence[Mapping[str, Any]], server: McpServer) -> tuple[ToolSpec, ...]:
    """Return the tools to offer, in the server's order."""
    names = [str(tool["name"]) for tool in listed]
    missing = [name for name in server.only or () if name not in names]
    if missing:
        raise ConfigError(
            f"MCP server {server.command!r} has no tool {missing[0]!r}; it has: {', '.join(names)}"
        )
    return checked_tools(
        [
            {
                "type": "function",
                "function": {
                    "name": server.prefix + str(tool["name"]),
                    "description": tool.get("description") or "",
                    "parameters": tool.get("inputSchema") or {},
                },
            }
            for tool in listed
            if server.only is None or tool["name"] in server.only
        ]
    )


def _text(answer: Mapping[str, Any]) -> str:
    """Return the result of a tool as text."""
    parts = []
    for block in answer.get("content") or ():
        kind = block.get("type")
        parts.append(str(block["text"]) if kind == "text" else f"[{kind} left out]")
    if not parts and answer.get("structuredContent") is not None:
        parts.append(json.dumps(answer["structuredContent"], ensure_ascii=False))
    return "\n".join(parts)
