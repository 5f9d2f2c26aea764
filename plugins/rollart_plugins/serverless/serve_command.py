"""``rollart serve-reward``: one reward as an HTTP function.

Takes: a reward with its options, an address, the variable of a token. Gives: a server that runs
until a signal. Never: accepts requests of other machines without a token, except with
``--no-token``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from aiohttp import web

from rollart_core.cli.options import as_options
from rollart_core.errors import UserError, first_line
from rollart_plugins.serverless.function import MAX_BYTES, RewardFunction
from rollart_plugins.serverless.wire import STATUS, Refused

PATHS: Final = ("/", "/invoke", "/score")
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_END_S: Final = 10.0
"""Maximum time for running calls when the server is stopped."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The address of the server, and its access control."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str = ""
    """Token that callers must send as ``Authorization: Bearer TOKEN``. Empty: none."""
    open_to_all: bool = False
    """Whether other machines can send requests without a token."""
    max_bytes: int = MAX_BYTES
    """Maximum size of one call."""

    def check(self) -> None:
        """Check that the server is not accessible to all by mistake.

        Raises:
            UserError: If other machines could send requests without a token.
        """
        if self.host not in LOOPBACK and not self.token and not self.open_to_all:
            raise UserError(
                f"on {self.host}, other machines could send requests without a token: set "
                "ROLLART_REWARD_TOKEN, or use --no-token if the platform controls access"
            )


def application(function: RewardFunction, listening: Listening) -> web.Application:
    """Return the function as a web application."""

    async def score(request: web.Request) -> web.Response:
        try:
            _expect_token(request, listening.token)
            body = await _answer(function, request)
        except Refused as e:
            return _json(e.body(), STATUS.get(e.kind, 500))
        return _json(body, 200)

    async def health(request: web.Request) -> web.Response:
        # The reward is not secret, but only callers with the token can read it.
        try:
            _expect_token(request, listening.token)
        except Refused:
            return web.json_response({"status": "ok"})
        said = {"status": "ok", "reward": function.id, "options": function.digest}
        return web.json_response(said)

    app = web.Application(client_max_size=listening.max_bytes)
    for path in PATHS:
        app.router.add_post(path, score)
    app.router.add_get("/healthz", health)
    app.on_cleanup.append(lambda _: function.close())
    return app


async def serve(
    function: RewardFunction,
    listening: Listening,
    *,
    began: Callable[[str], None],
    until: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Serve until a signal arrives.

    Args:
        function: The reward.
        listening: The address and access control.
        began: Called with the URL when the server is ready.
        until: Awaited instead of a signal.

    Raises:
        UserError: If the server cannot listen on this address, or is not allowed to.
    """
    listening.check()
    runner = web.AppRunner(application(function, listening), shutdown_timeout=_END_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listening.host, listening.port)
        try:
            await site.start()
        except OSError as e:
            where = f"{listening.host}:{listening.port}"
            raise UserError(f"cannot listen on {where}: {first_line(str(e))}") from e
        port = runner.addresses[0][1]
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        began(f"http://{host}:{port}")
        await (until or _signal)()
    finally:
        await runner.cleanup()


async def _signal() -> None:
    """Wait for Ctrl-C, or for the platform to stop the container."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, told.set)
    await told.wait()


def _expect_token(request: web.Request, token: str) -> None:
    if not token:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise Refused("token", "the token is missing or wrong")


async def _answer(function: RewardFunction, request: web.Request) -> bytes:
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as e:
        most = request.app._client_max_size / 1e6
        raise Refused("too_large", f"the call is larger than {most:.1f} MB") from e
    try:
        return await function.answer(body)
    except Refused:
        raise
    except Exception as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        raise Refused("internal", f"{type(e).__name__}: {first_line(str(e))}") from e


def _json(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


TOKEN = "ROLLART_REWARD_TOKEN"
_EPILOG = "Example: rollart serve-reward judge base_url=http://judge:8000/v1 model=judge rubric=..."

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=_EPILOG)
def serve_reward(
    reward: Annotated[str, typer.Argument(help="Id, alias or module:Class of the reward.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The reward's options.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; use 0.0.0.0 in a container.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port. Default: $PORT, or 8080. 0: any free port."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Requests scored concurrently.")] = 16,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Accept requests without a token.")
    ] = False,
) -> None:
    """Serve one reward as an HTTP function, for the reward backends http and fc.

    Callers must send the token in the environment variable ROLLART_REWARD_TOKEN. Without a token,
    the function only accepts requests from this machine.
    """
    try:
        from rollart_plugins.serverless.serve_command import Listening, serve
    except ModuleNotFoundError as e:
        raise UserError("serve-reward requires aiohttp: pip install 'rollart[serverless]'") from e
    from rollart_plugins.serverless.function import RewardFunction

    listening = Listening(
        host=host,
        port=_port(port),
        token=os.environ.get(TOKEN, ""),
        open_to_all=no_token,
    )
    listening.check()
    function = RewardFunction(reward, as_options(options or []), num_threads=threads)

    def began(url: str) -> None:
        typer.echo(f"{function.id} on {url}")

    asyncio.run(serve(function, listening, began=began))


def _port(asked: int | None) -> int:
    if asked is not None:
        return asked
    said = os.environ.get("PORT", "8080")
    if not said.isdigit() or int(said) > 65535:
        raise UserError(f"PORT is {said!r}, but must be a number from 0 to 65535")
    return int(said)
