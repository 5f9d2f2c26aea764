"""The boxes of this process with environments in them, and a seat in one for each environment.

Takes: a recipe, an environment's id and options. Gives: :class:`EnvSlot`. Never: begins an episode
in a box that is retired, or keeps a box for long in which nobody sits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from rollart_core.errors import ConfigError, PluginError, SandboxFailure, UnknownIdError, first_line
from rollart_sandboxes.isolation.recipe import Recipe
from rollart_sandboxes.isolation.sandbox import EnvSandbox, Raised
from rollart_sandboxes.pool.source import SandboxSource

LINGER_S = 10.0
"""How long an empty box waits for the next environment; what is made one after the other shares."""


class _Sandboxes:
    """The boxes of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        isolation = recipe.isolation
        self._recipe = recipe
        self._source = SandboxSource(isolation.sandbox, isolation.options, isolation.pool)
        self._starts: dict[EnvSandbox, asyncio.Task[None]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def lend(self) -> EnvSandbox:
        """Return a box that is up, with one seat more."""
        most = self._recipe.isolation.num_seats
        free = (b for b in self._starts if b.num_seats < most and not b.retired)
        box = next(free, None)
        if box is None:
            box = EnvSandbox(self._source, self._recipe)
            self._starts[box] = asyncio.create_task(box.start())
        box.num_seats += 1
        box.num_opened += 1
        try:
            await asyncio.shield(self._starts[box])
        except BaseException as e:
            await asyncio.shield(self.take_back(box))
            if isinstance(e, SandboxFailure) and self._recipe.hint:
                said = SandboxFailure(f"{e}. {self._recipe.hint}", boundary=e.boundary)
                said.retryable = e.retryable
                raise said from e
            raise
        return box

    async def take_back(self, box: EnvSandbox) -> None:
        """Count a seat less; an empty box is closed, the only one after a while."""
        box.num_seats -= 1
        if box.num_seats:
            return
        if len(self._starts) == 1 and not box.retired and self._starts[box].done():
            asyncio.get_running_loop().call_later(LINGER_S, self._look, box, box.num_opened)
            return
        await self._close(box)

    async def close_idle(self) -> None:
        """Close the boxes in which nobody sits."""
        await asyncio.gather(*(self._close(b) for b in list(self._starts) if not b.num_seats))

    def _look(self, box: EnvSandbox, num_opened: int) -> None:
        """Close a box in which nobody has sat since."""
        if box in self._starts and not box.num_seats and box.num_opened == num_opened:
            self._closing = asyncio.create_task(self._close(box))

    async def _close(self, box: EnvSandbox) -> None:
        """Close an empty box, and with the last of them the pool."""
        if box.num_seats or (start := self._starts.pop(box, None)) is None:
            return  # somebody has sat down since, or it is being closed
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await box.close()
        if not self._starts:
            _boxes.pop(self._recipe.key, None)
            await self._source.close()


_boxes: dict[str, _Sandboxes] = {}


async def close_idle() -> None:
    """Close all boxes of this process in which nobody sits."""
    await asyncio.gather(*(boxes.close_idle() for boxes in list(_boxes.values())))


def _sandboxes_of(recipe: Recipe) -> _Sandboxes:
    return _boxes.setdefault(recipe.key, _Sandboxes(recipe))


def _forget() -> None:
    _boxes.clear()  # in a fork: they are the parent's


os.register_at_fork(after_in_child=_forget)


class EnvSlot:
    """One environment in a box; all its coroutines run on the boxes' loop.

    Args:
        recipe: What the box is made of.
        env_id: Id or ``module:Class``, as the box knows it.
        options: The environment's own.
    """

    _numbers = itertools.count(1)

    def __init__(self, recipe: Recipe, env_id: str, options: Mapping[str, object]) -> None:
        self._recipe, self._env_id = recipe, env_id
        self._options = json_options(options)
        self._number = 0
        self._box: EnvSandbox | None = None
        self._boxes: _Sandboxes | None = None
        self._closed = False
        self.facts: dict[str, Any] = {}

    async def describe(self) -> dict[str, Any]:
        """Return what the box knows of the environment.

        Raises:
            UserError: When it knows no such environment, or cannot import it.
            SandboxFailure: When there is no box.
        """
        said = await self._ask("describe")
        if not isinstance(said, dict):
            raise PluginError(f"{self._env_id}: the box describes it as {type(said).__name__}")
        return said

    async def open(self) -> None:
        """Make the environment in a box.

        Raises:
            UserError: When it cannot be made of these options.
            EpisodeError: When its making raised, or the box is gone.
        """
        said = await self._ask("open")
        if not isinstance(said, dict) or not isinstance(said.get("offers", []), list):
            await asyncio.shield(self._leave())
            message = "the box says of its environment what cannot be read"
            raise SandboxFailure(message, boundary="isolation")
        self.facts = said

    async def call(self, call: str, *args: object) -> Any:
        """Call a method of the environment.

        Raises:
            EpisodeError: What it raised, or why the box is gone.
        """
        if self._closed or self._box is None:
            raise RuntimeError("the environment is closed")
        try:
            return await self._box.call(self._number, call, *args)
        except Raised as e:
            raise e.failure(f"env.{call}") from e

    async def begin(self, *args: object) -> Any:
        """Begin an episode, in another box if this one is dead or has had its share."""
        if self._closed:
            raise RuntimeError("the environment is closed")
        if self._box is None or self._box.retired:
            await self._leave()
            await self.open()
        assert self._box is not None
        self._box.num_episodes += 1
        return await self.call("reset", *args)

    async def close(self) -> None:
        """Close the environment, and leave the box; may be called twice."""
        self._closed = True
        await self._leave()

    async def _ask(self, call: str) -> Any:
        """Sit down in a box, and have the environment described or made."""
        boxes = _sandboxes_of(self._recipe)
        box = await boxes.lend()
        self._boxes, self._box, self._number = boxes, box, next(self._numbers)
        try:
            return await box.call(self._number, call, self._env_id, self._options)
        except Raised as e:
            await self._leave()
            raise self._told(e, call) from e
        except BaseException:
            await self._leave()
            raise

    async def _leave(self) -> None:
        box, boxes, self._box = self._box, self._boxes, None
        if box is None or boxes is None:
            return
        try:
            if box.alive:
                async with asyncio.timeout(_CLOSE_S):
                    await box.call(self._number, "close")
        except (Raised, SandboxFailure, TimeoutError):
            pass  # an environment that cannot close has had its chance
        finally:
            await asyncio.shield(boxes.take_back(box))

    def _told(self, error: Raised, call: str) -> Exception:
        """Turn what the making of an environment raised into what a person can mend."""
        message = f"{self._env_id}: in its box: {first_line(error.message)}"
        if "UnknownIdError" in error.types or "LookupError" in error.types[:1]:
            return UnknownIdError(message)
        if "UserError" in error.types:
            return PluginError(message)
        if "ImportError" in error.types:
            said = f"{self._env_id}: in its box ({self._recipe.python}): {error}"
            return PluginError(first_line(said))
        if call == "describe":
            return PluginError(f"{self._env_id}: in its box: {first_line(str(error))}")
        return error.failure("making the environment")


_CLOSE_S = 5.0


def json_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return options as they travel to a box.

    Raises:
        ConfigError: When one of them is no plain value.
    """
    try:
        return dict(json.loads(json.dumps(dict(options))))
    except (TypeError, ValueError) as e:
        message = f"options of an isolated environment must be plain values: {first_line(str(e))}"
        raise ConfigError(message) from e
