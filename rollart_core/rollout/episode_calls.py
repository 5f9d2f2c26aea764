"""The calls that run for one episode, and how its end ends them.

Takes: blocks, in tasks of whoever called. Gives: an end that cancels them and waits for them.
Never: takes a block for ended whose caller has only stopped to wait for it, as one does whose
process is another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollart_core.errors import CancelledFailure


@dataclass(slots=True)
class EpisodeCalls:
    """See the module."""

    has_ended: bool = False
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Run a block until the end of the episode at the latest.

        Raises:
            CancelledFailure: When the episode ends before the block.
        """
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self.running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.has_ended and task.uncancel() <= before:  # nobody else has cancelled it
                raise end_failure(what) from None
            raise
        finally:
            self.running.discard(task)
            if not self.running:
                self._quiet.set()

    async def end(self, timeout_s: float) -> None:
        """Cancel what runs, and wait for its end for so long."""
        self.has_ended = True
        if not self.running:
            return
        self._quiet.clear()
        for task in self.running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()


def end_failure(what: str) -> CancelledFailure:
    """Return how a call fails whose episode has ended."""
    return CancelledFailure("the episode has ended", boundary=what)
