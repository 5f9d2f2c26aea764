"""The result of launching an agent: pipes to it, and its end.

Takes: nothing. Gives: the interface between the sandbox types and :class:`AgentSandbox`, which an
asyncio process already fits. Never: depends on where the agent runs.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Reads(Protocol):
    """The source of an agent's frames."""

    async def readexactly(self, n: int, /) -> bytes:
        """Return ``n`` bytes.

        Raises:
            asyncio.IncompleteReadError: If the stream ends before that.
        """


class Launched(Protocol):
    """An agent that is about to run."""

    @property
    def pid(self) -> int:
        """Its process id on the host; 0 if unknown."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """The agent's stdin; the agent ends when this is closed."""

    @property
    def stdout(self) -> Reads | None:
        """The agent's stdout."""

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """The agent's stderr."""

    def kill(self) -> None:
        """Kill the agent and all its descendants; ``wait`` returns when that is done."""

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
