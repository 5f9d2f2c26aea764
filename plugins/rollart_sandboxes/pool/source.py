"""Sources of sandboxes for environments: one pool per type and options in each process.

A pool contains the sandboxes in use, and a stock of warm sandboxes. An environment gets an unused
sandbox, from the stock if one there fits. Everything runs on the sandboxes' loop.

Takes: a sandbox's id and options. Gives: started sandboxes. Never: gives one sandbox to two
episodes, keeps a warm sandbox while a process waits for capacity, keeps the capacity of a sandbox
that did not start, or leaves a sandbox behind when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

from rollart_core.config.base import PluginRef
from rollart_core.config.sandbox_options import PoolOptions, SandboxedOptions
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import EpisodeError, SandboxFailure, boundary
from rollart_core.plugins import registry
from rollart_core.rollout import loop
from rollart_sandboxes.pool.admission import Admission, Request
from rollart_sandboxes.pool.gc import collect_garbage_in_background
from rollart_sandboxes.pool.live import Line, LiveSandboxes

__all__ = ["SandboxPool", "SandboxSource", "SandboxedOptions", "close_all", "sandbox_source"]

_EXIT_S: Final = 15.0

WARM_S: Final = 300.0
"""Maximum seconds that a sandbox waits in the stock; its lifetime is extended by this time."""
_TEND_S: Final = 0.5
_PROBE_S: Final = 10.0


class SandboxSource:
    """Sandboxes of one kind; all its coroutines run on the sandboxes' loop.

    Args:
        sandbox: Id or alias of a sandbox plugin.
        options: The fields of its config.
        pool: Limits of the number of sandboxes, and how many are kept ready.
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
        """Return a started and unused sandbox.

        Args:
            needs: Options of this sandbox that override the source's own, such as ``image`` (of a
                container) and ``ro_binds`` (paths of the host that it can read).

        Raises:
            SandboxFailure: If there is no capacity in time, or the sandbox does not start.
        """
        return await (await _here.pool_of(self)).take(needs)

    async def give_back(self, sandbox: Sandbox) -> None:
        """Return a sandbox that is no longer needed; it is closed."""
        pool = _here.pools.get(_key(self))
        await (pool.give_back(sandbox) if pool is not None else sandbox.close())

    async def close(self) -> None:
        """Release the pool; its stock is closed after the last user. ``take`` reopens it."""
        pool = _here.leave(self)
        if pool is not None:
            await pool.drain()


class _Here:
    """The pools of this process, and their users."""

    def __init__(self) -> None:
        self.pools: dict[str, SandboxPool] = {}
        self.users: dict[str, WeakSet[SandboxSource]] = {}
        self.admission: Admission | None = None
        self._first: asyncio.Lock | None = None

    async def pool_of(self, source: SandboxSource) -> SandboxPool:
        """Return the pool of a source; it is created on first use."""
        admission = await self._admission(source.sandbox)
        key = _key(source)
        if key not in self.pools:
            self.pools[key] = SandboxPool(source.sandbox, source.options, source.pool, admission)
        self.users.setdefault(key, WeakSet()).add(source)
        return self.pools[key]

    def leave(self, source: SandboxSource) -> SandboxPool | None:
        """Remove a source; return its pool if it was the last user."""
        users = self.users.get(_key(source), WeakSet())
        was_there = source in users
        users.discard(source)
        return self.pools.get(_key(source)) if was_there and not users else None

    async def _admission(self, sandbox: str) -> Admission:
        """Return the admission control; before the first use, collect garbage."""
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
    """Return a source of sandboxes of this kind in this process."""
    ref = PluginRef.model_validate(sandbox)
    return SandboxSource(ref.id, ref.options, pool)


def close_all() -> None:
    """Close all sandboxes of this process; garbage collection removes the rest later."""
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
    """Reset the state in a fork: the sandboxes belong to the parent."""
    global _here
    _here = _Here()


os.register_at_fork(after_in_child=_forget)


@dataclass(slots=True, eq=False)
class _Kept:
    """A sandbox and its line in the ledger."""

    line: Line
    key: str
    sandbox: Sandbox | None = None
    since: float = 0.0


class SandboxPool:
    """Sandboxes of one type with one set of options; see the module.

    Args:
        sandbox: Id or alias of a sandbox plugin.
        options: The fields of its config.
        pool: Limits of the number of sandboxes, and how many are kept ready.
        admission: This process's admission control.
    """

    def __init__(
        self, sandbox: str, options: Mapping[str, Any], pool: PoolOptions, admission: Admission
    ) -> None:
        self._id = registry.spec("sandboxes", sandbox).id
        self._options = dict(options)
        self._pool = pool
        self._admission = admission
        self._stock: list[_Kept] = []
        self._used: dict[int, _Kept] = {}
        self._needs: dict[str, object] | None = None
        self._filling: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tending: asyncio.Task[None] | None = None

    @property
    def num_warm(self) -> int:
        """Number of sandboxes in the stock."""
        return len(self._stock)

    async def take(self, needs: Mapping[str, object]) -> Sandbox:
        """Return a started and unused sandbox.

        Raises:
            SandboxFailure: If there is no capacity, or the sandbox does not start.
            UserError: If the needs contain an unknown option.
        """
        self._needs = dict(needs)
        kept = await self._from_stock(_needs_key(needs))
        if kept is None:
            request = self._request(needs)
            line = await self._admission.admit(request, self._free_capacity)
            kept = await self._started(line, needs, request.ttl_s)
        assert kept.sandbox is not None
        self._used[id(kept.sandbox)] = kept
        self._refill()
        return kept.sandbox

    async def give_back(self, sandbox: Sandbox) -> None:
        """Close a sandbox; it is not used again."""
        kept = self._used.pop(id(sandbox), None)
        if kept is not None:
            await self._closed(kept)
            self._refill()

    async def drain(self, *, used_too: bool = False) -> None:
        """Close the stock, and the sandboxes in use if requested; ``take`` can be called again."""
        self._needs = None
        if self._tending is not None:
            self._tending.cancel()
        for task in self._filling:
            task.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        kept, self._stock = self._stock, []
        if used_too:
            kept += self._used.values()
            self._used = {}
        await asyncio.gather(*map(self._closed, kept), *self._tasks, return_exceptions=True)

    async def _from_stock(self, key: str) -> _Kept | None:
        """Return a warm sandbox that fits and still answers."""
        while fitting := [kept for kept in self._stock if kept.key == key]:
            kept = fitting[0]
            self._stock.remove(kept)
            try:
                assert kept.sandbox is not None
                result = await kept.sandbox.exec(["true"], timeout_s=_PROBE_S)
                if result.exit_code == 0:
                    kept.line.update(is_idle=False)
                    return kept
            except (EpisodeError, OSError):
                pass
            except BaseException:
                self._spawn(self._close(kept), self._tasks)
                raise
            await self._closed(kept)
        return None

    def _request(self, needs: Mapping[str, object], *, extra_s: float = 0.0) -> Request:
        """Return the admission request; a sandbox type without the option ``ttl_s`` gets none.

        Raises:
            ConfigError: If the sandbox type has no such options.
        """
        options = registry.checked_options("sandboxes", self._id, {**self._options, **needs})
        life, most = options.get("ttl_s"), options.get("memory_bytes")
        pool = self._pool
        if most is not None and most < pool.reserve_bytes:
            pool = pool.model_copy(update={"reserve_bytes": most})
        return Request(self._id, pool, None if life is None else life + extra_s)

    async def _started(self, line: Line, needs: Mapping[str, object], ttl_s: float | None) -> _Kept:
        """Start a sandbox with reserved capacity; release the capacity if the start fails."""
        kept = _Kept(line, _needs_key(needs))
        try:
            options = {**self._options, **needs}
            if ttl_s is not None:
                options["ttl_s"] = ttl_s
            kept.sandbox = registry.build("sandboxes", self._id, options)
            kept.sandbox.line = line
            with boundary(SandboxFailure, "sandbox.start"):
                await kept.sandbox.start()
                line.update(ready_at=time.time())
            self._admission.look_again()
        except BaseException:
            await self._closed(kept)
            raise
        return kept

    def _refill(self) -> None:
        """Start missing sandboxes of the stock in the background, with the last needs."""
        needs = self._needs
        if needs is None:
            return
        key = _needs_key(needs)
        missing = self._pool.warm - len(self._filling)
        missing -= sum(kept.key == key for kept in self._stock)
        for _ in range(missing):
            self._spawn(self._fill(needs), self._filling)

    async def _fill(self, needs: Mapping[str, object]) -> None:
        """Add one sandbox to the stock when there is capacity; it replaces one with other needs."""
        key = _needs_key(needs)
        others = [kept for kept in self._stock if kept.key != key]
        if len(self._stock) >= self._pool.warm and others:
            self._stock.remove(others[0])
            await self._closed(others[0])
        request = self._request(needs, extra_s=WARM_S)
        with contextlib.suppress(EpisodeError, OSError):  # the next take reports the error
            while (line := await self._admission.admit_at_once(request)) is None:
                await asyncio.sleep(_TEND_S)
                if self._needs is None or _needs_key(self._needs) != key:
                    return
            kept = await self._started(line, needs, request.ttl_s)
            kept.since = time.monotonic()
            line.update(is_idle=True)
            self._stock.append(kept)
            if self._tending is None or self._tending.done():
                self._tending = self._spawn(self._tend(), set())

    async def _tend(self) -> None:
        """Close old warm sandboxes, and one at a time while a process waits for capacity."""
        while self._stock:
            await asyncio.sleep(_TEND_S)
            old = [k for k in self._stock if time.monotonic() - k.since > WARM_S]
            for kept in old:
                self._stock.remove(kept)
                await self._closed(kept)
            if self._admission.ledger.someone_waits():
                await self._free_capacity()

    async def _free_capacity(self) -> None:
        """Close the warm sandbox that has waited longest."""
        if self._stock:
            await self._closed(self._stock.pop(0))

    async def _closed(self, kept: _Kept) -> None:
        """Close a sandbox completely, even if the caller is cancelled."""
        await asyncio.shield(self._spawn(self._close(kept), self._tasks))

    async def _close(self, kept: _Kept) -> None:
        """Close a sandbox and its line; garbage collection removes one that cannot be closed."""
        is_gone = kept.sandbox is None
        try:
            if kept.sandbox is not None:
                with contextlib.suppress(Exception):
                    await kept.sandbox.close()
                    is_gone = True
        finally:
            kept.line.close(is_gone=is_gone)
            self._admission.look_again()

    def _spawn(
        self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        return task


def _needs_key(needs: Mapping[str, object]) -> str:
    return json.dumps(needs, sort_keys=True, default=str)
