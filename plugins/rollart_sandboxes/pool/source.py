"""Where an environment gets its boxes: from the pool that all its like share in this process.

Takes: a sandbox's id and options. Gives: started boxes. Never: hands one box to two episodes, or
leaves a box behind when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakSet

from rollart_core.config.base import PluginRef
from rollart_core.config.sandbox_options import PoolOptions, SandboxedOptions
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.rollout import loop
from rollart_sandboxes.pool.admission import Admission
from rollart_sandboxes.pool.gc import collect_garbage_in_background
from rollart_sandboxes.pool.live import LiveSandboxes
from rollart_sandboxes.pool.pool import SandboxPool

__all__ = ["SandboxSource", "SandboxedOptions", "close_all", "sandbox_source"]

_EXIT_S: Final = 15.0


class SandboxSource:
    """Boxes of one kind; all its coroutines run on the boxes' loop.

    Args:
        sandbox: Id or alias of a sandbox plugin.
        options: The fields of its config.
        pool: How many boxes there may be, and how many are kept ready.
    """

    def __init__(
        self,
        sandbox: str,
        options: Mapping[str, Any] | None = None,
        pool: PoolOptions | Mapping[str, Any] | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.options = dict(options or {})
        self.pool = PoolOptions.model_validate(pool or {})

    async def take(self, **needs: object) -> Sandbox:
        """Return a box that has started and that nobody has used.

        Args:
            needs: Options of this box that go before the source's own, such as ``image`` (of a
                container) and ``ro_binds`` (paths of the host that it may read).

        Raises:
            SandboxFailure: When there is no room for it in time, or it does not come up.
        """
        return await (await _here.pool_of(self)).take(needs)

    async def give_back(self, box: Sandbox) -> None:
        """Take a box that is no longer needed; it is closed."""
        pool = _here.pools.get(_key(self))
        await (pool.give_back(box) if pool is not None else box.close())

    async def close(self) -> None:
        """Let go of the pool, whose stock is closed when nobody uses it; ``take`` uses it again."""
        pool = _here.leave(self)
        if pool is not None:
            await pool.drain()


class _Here:
    """The pools of this process, and who uses them."""

    def __init__(self) -> None:
        self.pools: dict[str, SandboxPool] = {}
        self.users: dict[str, WeakSet[SandboxSource]] = {}
        self.admission: Admission | None = None
        self._first: asyncio.Lock | None = None

    async def pool_of(self, source: SandboxSource) -> SandboxPool:
        """Return the pool of a source, made when it is first asked for."""
        admission = await self._admission(source.sandbox)
        key = _key(source)
        if key not in self.pools:
            self.pools[key] = SandboxPool(source.sandbox, source.options, source.pool, admission)
        self.users.setdefault(key, WeakSet()).add(source)
        return self.pools[key]

    def leave(self, source: SandboxSource) -> SandboxPool | None:
        """Note that a source is done; return its pool if it was the last to use it."""
        users = self.users.get(_key(source), WeakSet())
        was_there = source in users
        users.discard(source)
        return self.pools.get(_key(source)) if was_there and not users else None

    async def _admission(self, sandbox: str) -> Admission:
        """Return the way to a box; before the first one, remove what a killed process left."""
        self._first = self._first or asyncio.Lock()
        async with self._first:
            if self.admission is None:
                await collect_garbage_in_background(sandbox)
                self.admission = Admission(LiveSandboxes())
                loop.at_exit(close_all)
            return self.admission


_here = _Here()


def sandbox_source(
    sandbox: PluginRef | Mapping[str, Any] | str,
    pool: PoolOptions | Mapping[str, Any] | None = None,
) -> SandboxSource:
    """Return where boxes of this kind come from in this process."""
    ref = PluginRef.model_validate(sandbox)
    return SandboxSource(ref.id, ref.options, pool)


def close_all() -> None:
    """Close all boxes of this process; what cannot be closed in time is left to the reaper."""
    pools = list(_here.pools.values())
    if pools:
        with contextlib.suppress(Exception):
            loop.submit(_drained(pools)).result(_EXIT_S)


async def _drained(pools: list[SandboxPool]) -> None:
    await asyncio.gather(*(pool.drain(used_too=True) for pool in pools))


def _key(source: SandboxSource) -> str:
    said = [source.sandbox, source.options, source.pool.model_dump()]
    return json.dumps(said, sort_keys=True, default=str)


def _forget() -> None:
    """Begin anew in a fork: the boxes are the parent's."""
    global _here
    _here = _Here()


os.register_at_fork(after_in_child=_forget)
