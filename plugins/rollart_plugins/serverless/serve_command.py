"""``rollart serve-reward``: one reward as an HTTP function.

Takes: a reward with its options, where to listen, a token by its variable. Gives: a server until it
is told to end. Never: listens to other machines without a token, unless ``--no-token`` says so.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from rollart_core.cli.options import as_options
from rollart_core.errors import UserError

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
        str, typer.Option(help="Where to listen; 0.0.0.0 in a container.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; else $PORT, else 8080. 0: any that is free."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Requests scored at once.")] = 16,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let other machines ask without a token.")
    ] = False,
) -> None:
    """Serve one reward as an HTTP function, for the reward backends http and fc.

    Callers must send the token that the variable ROLLART_REWARD_TOKEN holds. Without one the
    function listens to this machine alone.
    """
    try:
        from rollart_plugins.serverless.serve import Listening, serve
    except ModuleNotFoundError as e:
        raise UserError("serve-reward needs aiohttp: pip install 'rollart[serverless]'") from e
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
        raise UserError(f"PORT is {said!r}: it must be a number from 0 to 65535")
    return int(said)
