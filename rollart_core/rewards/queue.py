"""The queue of one reward: scores wait for a place, and travel together where they may.

    score(request) --> queue --> up to batch_size in a call, max_concurrent calls --> asker
    score_group(requests) -^     (a group is a call by itself)

Takes: requests. Gives: their results. Never: lets time run for what still waits in the queue, or
fails one request for another's sake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart_core.contracts.reward import Need, RewardRequest, RewardResult
from rollart_core.errors import ConfigError, RewardFailure
from rollart_core.rewards.backend_client import BackendClient, Places
from rollart_core.rewards.retry import Failed, RetryingScorer
from rollart_core.rewards.stats import RewardStats
from rollart_core.rewards.validation import trimmed


@dataclass(frozen=True, slots=True)
class RewardQueueDependencies:
    """What a lane is made of."""

    reward_id: str
    roads: Sequence[BackendClient]
    asker: RetryingScorer
    places: Places
    ledger: RewardStats
    needs: Sequence[Need] | None = None
    batch_size: int = 1
    batch_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """What somebody waits for: one request, or a whole group."""

    requests: tuple[RewardRequest, ...]
    results: asyncio.Future[list[RewardResult]]
    since_s: float
    whole: bool


class RewardQueue:
    """See the module."""

    def __init__(self, parts: RewardQueueDependencies) -> None:
        self._parts = parts
        self._queue: deque[_Pending] = deque()
        self._calls: dict[asyncio.Task[None], list[_Pending]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        parts.places.on_free = self._pump

    @property
    def ledger(self) -> RewardStats:
        """What its scores have cost."""
        return self._parts.ledger

    async def open(self) -> None:
        """Find out whether its backends can be asked.

        Raises:
            ConfigError: When one cannot.
        """
        for road in self._parts.roads:
            try:
                await road.backend.open()
            except ConfigError as e:
                who = f"reward {self._parts.reward_id} on "
                raise ConfigError(f"{'' if who in str(e) else who + road.name + ': '}{e}") from e

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score one trajectory.

        Raises:
            RewardFailure: When it cannot be.
            DeadlineFailure: When it took too long.
        """
        return (await self._ask((request,), whole=False))[0]

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score a whole group in one call.

        Raises:
            RewardFailure: When one of its members cannot be scored.
            DeadlineFailure: When it took too long.
        """
        return await self._ask(tuple(requests), whole=True)

    def gauges(self) -> Mapping[str, float]:
        """Return what there is to count now."""
        found = {"waiting": float(len(self._queue)), "in_flight": float(len(self._calls))}
        for road in self._parts.roads:
            found.update(road.backend.gauges())
        return found

    async def close(self) -> None:
        """End all calls and close the backends; may be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for asked in self._queue:
            asked.results.cancel()
        self._queue.clear()
        for road in self._parts.roads:
            await road.backend.close()

    async def _ask(self, requests: tuple[RewardRequest, ...], *, whole: bool) -> list[RewardResult]:
        if self._closed:
            raise RewardFailure("scoring has ended", boundary="reward.score")
        loop = asyncio.get_running_loop()
        carried = tuple(trimmed(request, self._parts.needs) for request in requests)
        asked = _Pending(carried, loop.create_future(), loop.time(), whole)
        self._queue.append(asked)
        loop.call_soon(self._pump)  # so that what comes at once can travel together
        try:
            return await asked.results
        except asyncio.CancelledError:
            self._forget(asked)
            raise

    def _pump(self) -> None:
        """Make calls while there are places, and something to ask."""
        while self._queue and not self._closed and self._ripe() and self._parts.places.take():
            batch = [self._queue.popleft()]
            while self._queue and self._fits(batch, self._queue[0]):
                batch.append(self._queue.popleft())
            call = asyncio.create_task(self._call(batch))
            self._calls[call] = batch
            call.add_done_callback(self._ended)

    def _fits(self, batch: Sequence[_Pending], asked: _Pending) -> bool:
        return len(batch) < self._parts.batch_size and not (asked.whole or batch[0].whole)

    def _ripe(self) -> bool:
        """Whether the next call need not wait to be filled; looks again when it must."""
        wait_s, first = self._parts.batch_wait_s, self._queue[0]
        if not wait_s or first.whole or len(self._queue) >= self._parts.batch_size:
            return True
        loop = asyncio.get_running_loop()
        left_s = first.since_s + wait_s - loop.time()
        if left_s <= 0:
            return True
        if self._timer is None:
            self._timer = loop.call_later(left_s, self._look)
        return False

    def _look(self) -> None:
        self._timer = None
        self._pump()

    async def _call(self, batch: Sequence[_Pending]) -> None:
        outcomes = iter(await self._parts.asker.ask([r for asked in batch for r in asked.requests]))
        for asked in batch:
            _settle(asked, [next(outcomes) for _ in asked.requests])

    def _ended(self, call: asyncio.Task[None]) -> None:
        """Free its place; what it left without an answer, by a fault of ours, fails."""
        batch = self._calls.pop(call)
        error = None if call.cancelled() else call.exception()
        for asked in batch:
            if asked.results.done():
                continue
            if error is None:
                asked.results.cancel()
            else:
                asked.results.set_exception(error)
        self._parts.places.give()

    def _forget(self, asked: _Pending) -> None:
        """Nobody waits for it: take it back, or end its call when that was all it was for."""
        if asked in self._queue:
            self._queue.remove(asked)
            return
        for call, batch in self._calls.items():
            if asked in batch and all(one.results.done() for one in batch):
                call.cancel()


def _settle(asked: _Pending, outcomes: Sequence[RewardResult | Failed]) -> None:
    if asked.results.done():
        return
    results = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
    if len(results) == len(outcomes):
        asked.results.set_result(results)
        return
    failure = next(outcome for outcome in outcomes if not isinstance(outcome, RewardResult))
    asked.results.set_exception(failure)
