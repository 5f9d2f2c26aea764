"""The walls that this machine can build, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache

from rollart_core.errors import SandboxFailure
from rollart_plugins.sandboxes.box import AgentSandbox
from rollart_plugins.sandboxes.bubblewrap import BubblewrapSandbox
from rollart_plugins.sandboxes.process import ProcessSandbox

MIB = 1 << 20

WALLS: dict[str, Callable[..., AgentSandbox]] = {
    "process": lambda **options: ProcessSandbox(trusted=True, **options),
    "bubblewrap": BubblewrapSandbox,
}


@cache
def no_bubblewrap() -> str:
    """Why bubblewrap does not work here; empty where it does."""

    async def attempt() -> None:
        async with opened("bubblewrap"):
            pass

    try:
        asyncio.run(attempt())
    except SandboxFailure as e:
        return str(e)
    return ""


@asynccontextmanager
async def opened(wall: str, **options: object) -> AsyncIterator[AgentSandbox]:
    """Give a box that is up, and take it down."""
    box = WALLS[wall](**options)
    await box.start()
    try:
        yield box
    finally:
        await box.close()
