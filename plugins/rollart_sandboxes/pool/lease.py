"""What everything that acts in a box of its own shares: one box an episode, given back by any road.

Takes: a source of boxes. Gives: a box to act in. Never: keeps it after a failed call, or past
``close``.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.rollout import loop
from rollart_sandboxes.pool.source import SandboxSource

T = TypeVar("T")


class SandboxLease:
    """The box of the present episode, and how it comes and goes.

    Args:
        boxes: Where boxes come from; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: SandboxSource) -> None:
        self._boxes = boxes
        self._box: Sandbox | None = None

    async def open_sandbox(self, **needs: object) -> Sandbox:
        """Give back the box of the last episode and take a fresh one, as ``SandboxSource.take``."""
        await self._give_back()
        self._box = await self._boxes.take(**needs)
        return self._box

    def close(self) -> None:
        """Give the box back, and let go of the pool; may be called twice."""
        loop.run(self._let_go())

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; the box does not outlive its failure."""
        try:
            return await work
        except BaseException:
            await self._give_back()
            raise

    async def _let_go(self) -> None:
        try:
            await self._give_back()
        finally:
            await self._boxes.close()

    async def _give_back(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self._boxes.give_back(box)
