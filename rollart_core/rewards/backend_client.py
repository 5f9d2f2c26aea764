"""One backend of one reward: asked with a deadline, hedged, and left alone while it fails.

    call --> backend.invoke ------------------------+--> the first good answer
              |  longer than most calls take        |
              +--> backend.invoke, the same key ----+   (only where a place is free)

Takes: calls. Gives: answers, or a BackendFailure or DeadlineFailure when there is none. Never:
tries again (:mod:`rollart_core.rewards.retry` does), or makes more calls at once than there are
places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollart_core.config.scoring import Hedge
from rollart_core.contracts.reward import RewardAnswer, RewardBackend, RewardCall
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure, boundary, first_line
from rollart_core.rewards.circuit_breaker import Change, CircuitBreaker
from rollart_core.rewards.stats import LOOK_S, RewardStats

Tell: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Hears of what happened: a kind, and plain JSON."""


@dataclass(slots=True)
class Places:
    """How many calls may be made at once."""

    num_free: int
    on_free: Callable[[], None] | None = None
    """Hears when there is a place again."""

    def take(self) -> bool:
        """Take a place; False where none is free."""
        if self.num_free < 1:
            return False
        self.num_free -= 1
        return True

    def give(self) -> None:
        """Give it back."""
        self.num_free += 1
        if self.on_free is not None:
            self.on_free()


@dataclass(frozen=True, slots=True)
class BackendClientDependencies:
    """What a client shares with the others of its reward."""

    reward_id: str
    ledger: RewardStats
    places: Places
    tell: Tell
    hedge: Hedge | None = None


class BackendClient:
    """See the module.

    Args:
        name: Id of the backend.
        backend: The backend.
        breaker: Says when it is left alone; None: never.
        parts: Shared.
    """

    def __init__(
        self,
        name: str,
        backend: RewardBackend,
        breaker: CircuitBreaker | None,
        parts: BackendClientDependencies,
    ) -> None:
        self.name = name
        self.backend = backend
        self._breaker = breaker
        self._parts = parts

    @property
    def is_out(self) -> bool:
        """Whether it is left alone, but for a call that finds out if it is there again."""
        return self._breaker is not None and not self._breaker.closed

    def wait_s(self) -> float:
        """Return after how many seconds it may be asked; 0: now."""
        return self._breaker.wait_s(_now_s()) if self._breaker else 0.0

    async def ask(self, call: RewardCall) -> RewardAnswer:
        """Make a call.

        Raises:
            BackendFailure: When it was not answered.
            DeadlineFailure: When it was not answered in time.
            RewardFailure: When the reward raised it for all of it.
        """
        trial = self._breaker.begin() if self._breaker else False
        try:
            answer = await self._in_time(call)
        except (BackendFailure, DeadlineFailure) as e:
            self._failed(e, trial)
            raise
        except RewardFailure:
            self._succeeded(trial)
            raise
        except asyncio.CancelledError:
            if self._breaker:
                self._breaker.given_up(trial=trial)
            raise
        broken = [r for r in answer.results if isinstance(r, BackendFailure | DeadlineFailure)]
        if broken and len(broken) == len(answer.results):
            self._failed(broken[0], trial)
        else:
            self._succeeded(trial)
        return answer

    # The call and its hedge

    async def _in_time(self, call: RewardCall) -> RewardAnswer:
        try:
            async with asyncio.timeout(call.deadline_s):
                if self._parts.hedge is None:
                    return await self._timed(call)
                return await self._raced(call)
        except TimeoutError as e:
            message = f"no answer within {call.deadline_s:.3g} s"
            raise DeadlineFailure(message, boundary="reward.score") from e

    async def _raced(self, call: RewardCall) -> RewardAnswer:
        calls: list[asyncio.Future[RewardAnswer]] = [asyncio.ensure_future(self._timed(call))]
        try:
            if await self._is_slow(calls[0]):
                calls.append(self._second(call))
            return await self._first_good(calls)
        finally:
            for one in calls:
                one.cancel()
                one.add_done_callback(_heard)

    async def _timed(self, call: RewardCall) -> RewardAnswer:
        ledger = self._parts.ledger
        number = ledger.begun(_now_s())
        try:
            with boundary(BackendFailure, "reward.score"):
                answer = await self.backend.invoke(call)
                if len(answer.results) != len(call.requests):
                    found, wanted = len(answer.results), len(call.requests)
                    raise BackendFailure(f"{found} results for {wanted} requests")
        except BaseException:
            ledger.unanswered(number)
            raise
        ledger.answered(number, _now_s(), answer.cost)
        return answer

    async def _is_slow(self, call: asyncio.Future[RewardAnswer]) -> bool:
        """Wait until a call is slow and may be made again (True), or has ended (False)."""
        hedge, began_s = self._parts.hedge, _now_s()
        while hedge is not None and not call.done():
            usual_s = self._parts.ledger.slow_s(hedge.quantile, _now_s())
            left_s = LOOK_S
            if usual_s is not None:
                left_s = began_s + max(hedge.least_s, usual_s) - _now_s()
                if left_s <= 0 and self._may_hedge():
                    return True
            await asyncio.wait([call], timeout=left_s if left_s > 0 else LOOK_S)
        return False

    def _may_hedge(self) -> bool:
        hedge, counts = self._parts.hedge, self._parts.ledger.counts
        assert hedge is not None
        first = counts["calls"] - counts["hedges"]
        return counts["hedges"] < hedge.max_share * first and self._parts.places.take()

    def _second(self, call: RewardCall) -> asyncio.Future[RewardAnswer]:
        """Make the call again, in a place that was taken for it."""
        self._parts.ledger.counts["hedges"] += 1
        self._say("reward_hedge", tickets=[r.ticket_id for r in call.requests])
        second = asyncio.ensure_future(self._timed(call))
        # Not in the call itself, which may be cancelled before it has begun.
        second.add_done_callback(lambda _: self._parts.places.give())
        return second

    async def _first_good(self, calls: Sequence[asyncio.Future[RewardAnswer]]) -> RewardAnswer:
        """Return the first answer; raise what the first call raised when there is none."""
        waiting = set(calls)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                if one.exception() is None:
                    self._parts.ledger.counts["hedges_won"] += one is not calls[0]
                    return one.result()
        return calls[0].result()

    # What its calls say of it

    def _succeeded(self, trial: bool) -> None:
        if self._breaker:
            self._changed(self._breaker.succeeded(trial=trial), "it answers again")

    def _failed(self, error: Exception, trial: bool) -> None:
        self._parts.ledger.counts["broken"] += 1
        if self._breaker:
            self._changed(self._breaker.failed(_now_s(), trial=trial), first_line(str(error)))

    def _changed(self, change: Change | None, why: str) -> None:
        if change is not None:
            self._say(f"reward_breaker_{change}", why=why)

    def _say(self, kind: str, **more: object) -> None:
        said = {"reward": self._parts.reward_id, "backend": self.name, **more}
        self._parts.tell(kind, said)


def _heard(call: asyncio.Future[RewardAnswer]) -> None:
    """Take note of what nobody waits for any more."""
    if not call.cancelled():
        call.exception()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
