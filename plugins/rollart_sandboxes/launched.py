"""What a wall gives when it has launched an agent: pipes to it, and its end.

Takes: nothing. Gives: the seam between the walls and :class:`AgentSandbox`; a process of asyncio
fits it as it is. Never: says where the agent runs.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Reads(Protocol):
    """Where an agent's frames come from."""

    async def readexactly(self, n: int, /) -> bytes:
        """Return ``n`` bytes.

        Raises:
            asyncio.IncompleteReadError: When there are fewer before the end.
        """


class Launched(Protocol):
    """An agent that is about to run."""

    @property
    def pid(self) -> int:
        """Its process id on the host; 0 where that is not known."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """What the agent reads; it ends when this is closed."""

    @property
    def stdout(self) -> Reads | None:
        """What it writes."""

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """What it complains of."""

    def kill(self) -> None:
        """End it and all below it; ``wait`` says when that is done."""

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
