"""Places of episodes that training lends to a validation, out of ``rollout.max_concurrent``.

Takes: how many episodes of training hold a place now. Gives: a gate that an episode of the
validation waits at. Never: lets training and validation together have more episodes at once than
the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class LentPlaces:
    """An async context manager; a validation enters it once for each episode."""

    def __init__(self, most: int, num_running: Callable[[], int], lend: Callable[[int], None]):
        """Lend nothing yet.

        Args:
            most: ``rollout.max_concurrent``.
            num_running: Counts the episodes of training that hold a place.
            lend: Says how many places training has to leave.
        """
        self._most = most
        self._num_running = num_running
        self._lend = lend
        self._num_left = 0
        self._num_taken = 0
        self._changed = asyncio.Event()

    def begin(self, num_episodes: int) -> None:
        """Ask for the places of a validation with so many episodes."""
        self._num_left = num_episodes
        self._ask()

    def end(self) -> None:
        """Give all of them back."""
        self._num_left = 0
        self._ask()

    def look(self) -> None:
        """Training may have fewer episodes now."""
        self._changed.set()

    async def __aenter__(self) -> None:
        """Wait for a place."""
        while self._num_running() + self._num_taken >= self._most:
            self._changed.clear()
            await self._changed.wait()
        self._num_taken += 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the place back."""
        self._num_taken -= 1
        self._num_left -= 1
        self._ask()
        self._changed.set()

    def _ask(self) -> None:
        self._lend(max(0, min(self._num_left, self._most)))
