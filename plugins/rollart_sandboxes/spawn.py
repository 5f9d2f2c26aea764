"""Start a process with three pipes, in a way that can be cancelled.

Takes: a command line. Gives: an asyncio process. Never: waits forever if it is cancelled while the
process starts, as ``asyncio.create_subprocess_exec`` of Python 3.11 does.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence


async def spawn(argv: Sequence[str], *, pass_fds: Sequence[int] = ()) -> Process:
    """Start a process in a new session.

    Args:
        argv: The program and its arguments.
        pass_fds: File descriptors that it inherits, in addition to its pipes.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        process.kill()
        raise
