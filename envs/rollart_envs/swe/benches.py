"""Work on many candidates with a few checkouts, concurrently, with results in order.

Takes: candidates, and a function that works on one with a checkout. Gives: the results in the order
of the candidates, so they do not depend on timing. Never: leaves a sandbox open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from rollart_core.errors import SandboxFailure
from rollart_envs.swe.suite import Checkout

T = TypeVar("T")
R = TypeVar("R")
_TRIES = 3
_IN_A_ROW = 4


async def in_order(
    candidates: Iterable[T], work: Callable[[T], Awaitable[R]], jobs: int
) -> AsyncIterator[tuple[T, R]]:
    """Yield each candidate with its result; at most ``jobs`` run concurrently."""
    waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
    rest = iter(candidates)
    try:
        while True:
            while len(waiting) < jobs and (one := next(rest, _END)) is not _END:
                assert not isinstance(one, _End)
                waiting.append((one, asyncio.ensure_future(work(one))))
            if not waiting:
                return
            candidate, future = waiting[0]
            result = await future
            waiting.popleft()
            yield candidate, result
    finally:
        for _, future in waiting:
            future.cancel()
        await asyncio.gather(*(future for _, future in waiting), return_exceptions=True)


def of_start(failure: SandboxFailure) -> bool:
    """Return whether no sandbox starts at all, so that the next candidate would fail too."""
    return failure.boundary == "sandbox.start" or not failure.retryable


class FailureCount:
    """Counts consecutive candidates whose sandboxes failed."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def take(self, what: str, failed: bool) -> None:
        """Record the result of a candidate.

        Raises:
            SandboxFailure: If sandboxes failed for four candidates in a row.
        """
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if self._in_a_row >= _IN_A_ROW:
            raise SandboxFailure(f"four times in a row: {what}", boundary="swe.sandboxes")


class _End:
    pass


_END = _End()


class Benches:
    """Checkouts that are lent one by one, and replaced if their sandbox fails."""

    def __init__(self, open_one: Callable[[], Awaitable[Checkout]]) -> None:
        self._open_one = open_one
        self._free: list[Checkout] = []

    async def run(self, work: Callable[[Checkout], Awaitable[R]]) -> R:
        """Return the result of ``work`` on a checkout; a failed sandbox is replaced twice.

        Raises:
            SandboxFailure: If three sandboxes failed, or none can be started.
        """
        for left in reversed(range(_TRIES)):
            checkout = self._free.pop() if self._free else await self._open_one()
            try:
                result = await work(checkout)
            except SandboxFailure as failure:
                await checkout.close()
                if not left or not failure.retryable:
                    raise
            except BaseException:
                await checkout.close()
                raise
            else:
                self._free.append(checkout)
                return result
        raise AssertionError

    async def close(self) -> None:
        """Close all checkouts."""
        while self._free:
            await self._free.pop().close()
