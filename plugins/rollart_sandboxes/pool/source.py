"""Where an environment gets its boxes: from the pool that all its like share in this process.

The pool of one kind of box holds boxes in use, and a stock that is kept warm; an environment gets a
box that nobody has used, from the stock if one there fits. All of it runs on the boxes' loop.

Takes: a sandbox's id and options. Gives: started boxes. Never: hands one box to two episodes, keeps
a warm box from a process that waits for room, keeps the room of a box that did not start, or leaves
a box behind when the process ends.
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
"""Longest time that a box waits in the stock; it gets that much more time to live."""
_TEND_S: Final = 0.5
_PROBE_S: Final = 10.0


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


@dataclass(slots=True, eq=False)
class _Kept:
    """A box and its line in the ledger."""

    line: Line
    key: str
    box: Sandbox | None = None
    since: float = 0.0


class SandboxPool:
    """Boxes of one sandbox with one set of options; see the module.

    Args:
        sandbox: Id or alias of a sandbox plugin.
        options: The fields of its config.
        pool: How many boxes there may be, and how many are kept ready.
        admission: This process's way to a box.
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
        """How many boxes wait in the stock."""
        return len(self._stock)

    async def take(self, needs: Mapping[str, object]) -> Sandbox:
        """Return a box that has started and that nobody has used.

        Raises:
            SandboxFailure: When there is no room for it, or it does not come up.
            UserError: When there are no such needs.
        """
        self._needs = dict(needs)
        kept = await self._from_stock(_needs_key(needs))
        if kept is None:
            request = self._request(needs)
            line = await self._admission.admit(request, self._make_room)
            kept = await self._started(line, needs, request.ttl_s)
        assert kept.box is not None
        self._used[id(kept.box)] = kept
        self._refill()
        return kept.box

    async def give_back(self, box: Sandbox) -> None:
        """Close a box; nobody gets it again."""
        kept = self._used.pop(id(box), None)
        if kept is not None:
            await self._closed(kept)
            self._refill()

    async def drain(self, *, used_too: bool = False) -> None:
        """Close the stock, and the boxes in use if asked; the next ``take`` begins anew."""
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
        """Return a warm box that fits and still answers."""
        while fitting := [kept for kept in self._stock if kept.key == key]:
            kept = fitting[0]
            self._stock.remove(kept)
            try:
                assert kept.box is not None
                result = await kept.box.exec(["true"], timeout_s=_PROBE_S)
                if result.exit_code == 0:
                    kept.line.tell(is_idle=False)
                    return kept
            except (EpisodeError, OSError):
                pass
            except BaseException:
                self._spawn(self._close(kept), self._tasks)
                raise
            await self._closed(kept)
        return None

    def _request(self, needs: Mapping[str, object], *, extra_s: float = 0.0) -> Request:
        """Return what to ask admission for; a wall that knows no ``ttl_s`` is given none.

        Raises:
            ConfigError: When the wall has no such options.
        """
        options = registry.checked_options("sandboxes", self._id, {**self._options, **needs})
        life, most = options.get("ttl_s"), options.get("memory_bytes")
        pool = self._pool
        if most is not None and most < pool.reserve_bytes:
            pool = pool.model_copy(update={"reserve_bytes": most})
        return Request(self._id, pool, None if life is None else life + extra_s)

    async def _started(self, line: Line, needs: Mapping[str, object], ttl_s: float | None) -> _Kept:
        """Start the box whose room this is; when that fails, the room is free again."""
        kept = _Kept(line, _needs_key(needs))
        try:
            options = {**self._options, **needs}
            if ttl_s is not None:
                options["ttl_s"] = ttl_s
            kept.box = registry.build("sandboxes", self._id, options)
            kept.box.line = line
            with boundary(SandboxFailure, "sandbox.start"):
                await kept.box.start()
                line.tell(ready_at=time.time())
            self._admission.look_again()
        except BaseException:
            await self._closed(kept)
            raise
        return kept

    def _refill(self) -> None:
        """Start, in the background, as many boxes of the last needs as the stock lacks."""
        needs = self._needs
        if needs is None:
            return
        key = _needs_key(needs)
        missing = self._pool.warm - len(self._filling)
        missing -= sum(kept.key == key for kept in self._stock)
        for _ in range(missing):
            self._spawn(self._fill(needs), self._filling)

    async def _fill(self, needs: Mapping[str, object]) -> None:
        """Put one box into the stock, once there is room; what other needs had goes out for it."""
        key = _needs_key(needs)
        others = [kept for kept in self._stock if kept.key != key]
        if len(self._stock) >= self._pool.warm and others:
            self._stock.remove(others[0])
            await self._closed(others[0])
        request = self._request(needs, extra_s=WARM_S)
        with contextlib.suppress(EpisodeError, OSError):  # the next take says what is wrong
            while (line := await self._admission.admit_at_once(request)) is None:
                await asyncio.sleep(_TEND_S)
                if self._needs is None or _needs_key(self._needs) != key:
                    return
            kept = await self._started(line, needs, request.ttl_s)
            kept.since = time.monotonic()
            line.tell(is_idle=True)
            self._stock.append(kept)
            if self._tending is None or self._tending.done():
                self._tending = self._spawn(self._tend(), set())

    async def _tend(self) -> None:
        """Close warm boxes that are old, and one after the other when somebody waits for room."""
        while self._stock:
            await asyncio.sleep(_TEND_S)
            old = [k for k in self._stock if time.monotonic() - k.since > WARM_S]
            for kept in old:
                self._stock.remove(kept)
                await self._closed(kept)
            if self._admission.ledger.someone_waits():
                await self._make_room()

    async def _make_room(self) -> None:
        """Close the warm box that has waited longest."""
        if self._stock:
            await self._closed(self._stock.pop(0))

    async def _closed(self, kept: _Kept) -> None:
        """Close a box, to the end, even if who waits for it is cancelled."""
        await asyncio.shield(self._spawn(self._close(kept), self._tasks))

    async def _close(self, kept: _Kept) -> None:
        """Close a box and its line; a box that cannot be closed is left to the reaper."""
        is_gone = kept.box is None
        try:
            if kept.box is not None:
                with contextlib.suppress(Exception):
                    await kept.box.close()
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
