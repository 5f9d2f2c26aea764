"""Many candidates on a few checkouts: side by side, and told of in their order.

Takes: candidates, and what to do with one on a checkout. Gives: what came of each, in order, so
that the result does not hang on which one was quicker. Never: leaves a box behind.
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
    """Yield each candidate with what came of it; ``jobs`` at a time are worked on."""
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
    """Tell whether no box comes up: then the next candidate has none either."""
    return failure.boundary == "sandbox.start" or not failure.retryable


class FailureCount:
    """Counts candidates in a row whose boxes failed, whatever they were."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def take(self, what: str, failed: bool) -> None:
        """Take what came of a candidate.

        Raises:
            SandboxFailure: Boxes failed for four candidates in a row: no bug's fault.
        """
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if self._in_a_row >= _IN_A_ROW:
            raise SandboxFailure(f"four times in a row: {what}", boundary="swe.boxes")


class _End:
    pass


_END = _End()


class Benches:
    """Checkouts that are lent out one by one, and replaced when their box fails."""

    def __init__(self, open_one: Callable[[], Awaitable[Checkout]]) -> None:
        self._open_one = open_one
        self._free: list[Checkout] = []

    async def run(self, work: Callable[[Checkout], Awaitable[R]]) -> R:
        """Return what ``work`` gives on a checkout; a box that fails is replaced twice.

        Raises:
            SandboxFailure: Three boxes failed, or none can be had.
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
