"""An environment that lives in a box, as one of ours: who calls it need not know.

Takes: an id, its options, the key ``isolation``. Gives: :class:`IsolatedEnv`, with the optional
methods that the environment in the box has. Never: runs the environment's code here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import gymnasium

from rollart_core.errors import PluginError, SandboxFailure
from rollart_core.rollout import loop
from rollart_core.spaces import Messages, Text
from rollart_core.types import Observation
from rollart_sandboxes.isolation import config
from rollart_sandboxes.isolation.recipe import Recipe, recipe_of
from rollart_sandboxes.isolation.slots import EnvSlot

Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
_OPTIONAL = ("oracle", "secrets", "num_tasks", "task_clusters", "corpus")


class IsolatedEnv(gymnasium.Env[Observation, str]):
    """Stands for an environment in a box.

    When the box dies, the call that was made fails; the next ``reset`` finds another box.
    """

    def __init__(self, seat: EnvSlot) -> None:
        self._seat = seat
        self.observation_space: Any = Messages() if seat.facts.get("messages") else Text()
        self.action_space = Text()
        offers = seat.facts.get("offers") or ()
        for name in _OPTIONAL:
            if name in offers:  # whoever has no such method is asked by hasattr
                setattr(self, name, getattr(self, f"_{name}"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and wait for it."""
        super().reset(seed=seed)
        return _pair(loop.run(self._seat.begin(seed, options)))

    def step(self, action: str) -> Step:
        """Act, and wait for what comes of it."""
        return _five(loop.run(self._seat.call("step", action)))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Reset:
        """Begin an episode."""
        return _pair(await loop.on_loop(self._seat.begin(seed, options)))

    async def astep(self, action: str) -> Step:
        """Act."""
        return _five(await loop.on_loop(self._seat.call("step", action)))

    def close(self) -> None:
        """Close it, and leave its box; may be called twice."""
        loop.run(self._seat.close())

    def _oracle(self) -> str | None:
        advice: str | None = loop.run(self._seat.call("oracle"))
        return advice

    def _secrets(self) -> list[str]:
        return [str(text) for text in loop.run(self._seat.call("secrets"))]

    def _num_tasks(self, split: str) -> int | None:
        count = loop.run(self._seat.call("num_tasks", split))
        return None if count is None else int(count)

    def _task_clusters(self, split: str) -> list[str] | None:
        names = loop.run(self._seat.call("task_clusters", split))
        return None if names is None else [str(name) for name in names]

    def _corpus(self) -> list[str]:
        return [str(text) for text in loop.run(self._seat.call("corpus"))]


async def open_env(env_id: str, options: Mapping[str, object]) -> IsolatedEnv:
    """Make an environment in a box; cancelled, a box whose making hangs is killed.

    Args:
        env_id: Id or ``module:Class``, as the box knows it.
        options: Its own, and ``isolation``.

    Raises:
        UserError: When the isolation or the options are wrong.
        EpisodeError: When the box does not start, or the environment's making raised.
    """
    given, rest = config.split(options)
    recipe = await asyncio.to_thread(_recipe, given, env_id)
    seat = EnvSlot(recipe, env_id, rest)
    try:
        await loop.on_loop(seat.open())
        return IsolatedEnv(seat)
    except BaseException:
        await asyncio.shield(loop.on_loop(seat.close()))
        raise


def make(env_id: str, options: Mapping[str, object]) -> IsolatedEnv:
    """Make an environment in a box, and wait for it.

    Raises:
        UserError: As :func:`open_env`, and for a box that cannot start here.
        EpisodeError: As :func:`open_env`.
    """
    given, rest = config.split(options)
    seat = EnvSlot(_recipe(given, env_id), env_id, rest)
    try:
        loop.run(seat.open())
        return IsolatedEnv(seat)
    except BaseException as e:
        loop.run(seat.close())
        if isinstance(e, SandboxFailure) and not e.retryable:
            raise PluginError(f"{env_id}: {e}") from e
        raise


_recipes: dict[str, Recipe] = {}


def _recipe(given: object, env_id: str) -> Recipe:
    """Return what a box is made of: asked of pip and the Python once, not for each episode."""
    isolation = config.checked(given)
    key = f"{env_id} {isolation.model_dump_json()}"
    if key not in _recipes:
        _recipes[key] = recipe_of(isolation, env_id)
    return _recipes[key]


def _pair(answer: Any) -> Reset:
    observation, info = answer
    return observation, info


def _five(answer: Any) -> Step:
    observation, reward, terminated, truncated, info = answer
    return observation, reward, terminated, truncated, info
