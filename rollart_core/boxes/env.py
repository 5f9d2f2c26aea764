"""The base of environments that act in a box.

Takes: coroutines ``begin`` and ``act`` of a subclass. Gives: gymnasium's ``reset`` and ``step``,
and ``areset`` and ``astep`` for workers that await. Never: keeps a box after a failed call, or past
``close``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

import gymnasium

from rollart_core.boxes import loop
from rollart_core.boxes.source import BoxSource
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.spaces import Text
from rollart_core.types import Observation

T = TypeVar("T")
Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class BoxEnv(gymnasium.Env[Observation, str]):
    """An environment whose episodes each happen in a box of their own.

    Args:
        boxes: Where boxes come from; ``box_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: BoxSource) -> None:
        self.observation_space = Text()
        self.action_space = Text()
        self._boxes = boxes
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox | None:
        """The box of the present episode; None before the first one and after its end."""
        return self._box

    @abstractmethod
    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Begin an episode; ``open_box`` gives it its box."""

    @abstractmethod
    async def act(self, action: str) -> Step:
        """Act in the episode."""

    async def open_box(self, **needs: object) -> Sandbox:
        """Give back the box of the last episode and take a fresh one, as ``BoxSource.take``."""
        await self._give_back()
        self._box = await self._boxes.take(**needs)
        return self._box

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and wait for it."""
        super().reset(seed=seed)
        return loop.run(self._kept(self.begin(seed, options or {})))

    def step(self, action: str) -> Step:
        """Act, and wait for what comes of it."""
        return loop.run(self._kept(self.act(action)))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Reset:
        """Begin an episode."""
        super().reset(seed=seed)
        return await loop.on_loop(self._kept(self.begin(seed, options or {})))

    async def astep(self, action: str) -> Step:
        """Act."""
        return await loop.on_loop(self._kept(self.act(action)))

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
