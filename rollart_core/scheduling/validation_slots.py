"""Episode slots that training lends to a validation, out of ``rollout.max_concurrent``.

Takes: the number of training episodes that hold a slot. Gives: a gate that limits the episodes of
the validation. Never: lets training and validation together exceed the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class LentPlaces:
    """An async context manager; a validation enters it once for each episode."""

    def __init__(self, most: int, num_running: Callable[[], int], lend: Callable[[int], None]):
        """Create the gate; no slots are lent yet.

        Args:
            most: ``rollout.max_concurrent``.
            num_running: Returns the number of training episodes that hold a slot.
            lend: Called with the number of slots that training must leave free.
        """
        self._most = most
        self._num_running = num_running
        self._lend = lend
        self._num_left = 0
        self._num_taken = 0
        self._changed = asyncio.Event()

    def begin(self, num_episodes: int) -> None:
        """Request slots for a validation with this number of episodes."""
        self._num_left = num_episodes
        self._ask()

    def end(self) -> None:
        """Return all slots."""
        self._num_left = 0
        self._ask()

    def look(self) -> None:
        """Check for free slots again; call it when training may have fewer episodes."""
        self._changed.set()

    async def __aenter__(self) -> None:
        """Wait for a slot."""
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
        """Return the slot."""
        self._num_taken -= 1
        self._num_left -= 1
        self._ask()
        self._changed.set()

    def _ask(self) -> None:
        self._lend(max(0, min(self._num_left, self._most)))
