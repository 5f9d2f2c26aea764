"""The base of environments that act in a box.

Takes: coroutines ``begin`` and ``act`` of a subclass. Gives: gymnasium's ``reset`` and ``step``,
and ``areset`` and ``astep`` for workers that await. Never: keeps a box after a failed call, or past
``close``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import gymnasium

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.rollout import loop
from rollart_core.spaces import Text
from rollart_core.types import Observation
from rollart_sandboxes.pool.lease import SandboxLease
from rollart_sandboxes.pool.source import SandboxSource

Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class SandboxEnv(SandboxLease, gymnasium.Env[Observation, str]):
    """An environment whose episodes each happen in a box of their own.

    Args:
        boxes: Where boxes come from; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: SandboxSource) -> None:
        super().__init__(boxes)
        self.observation_space = Text()
        self.action_space = Text()

    @property
    def box(self) -> Sandbox | None:
        """The box of the present episode; None before the first one and after its end."""
        return self._box

    @abstractmethod
    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Begin an episode; ``open_sandbox`` gives it its box."""

    @abstractmethod
    async def act(self, action: str) -> Step:
        """Act in the episode."""

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
