"""Calls to the backends of one reward, with deadlines, hedging, retries and circuit breakers.

    requests --> RetryingScorer: a backend with a closed breaker --> answers: done
                    ^                              the reward's own failure: done, failed
                    +-- random, growing wait <-- unreachable, too late, invalid
                        from then on, requests that failed together are sent one by one

    call --> BackendClient: backend.invoke --------+--> the first good answer
              |  slower than most calls            |
              +--> backend.invoke, the same key ---+   (only if a slot is free)

Takes: the requests of one call. Gives: for each a result, or a failure that names the reward and
the backend. Never: treats a failure as a score, continues after the common deadline, or makes more
concurrent calls than there are slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rollart_core.config.scoring import Hedge
from rollart_core.contracts.reward import (
    RewardAnswer,
    RewardBackend,
    RewardCall,
    RewardRef,
    RewardRequest,
    RewardResult,
)
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure, boundary, first_line
from rollart_core.rewards.circuit_breaker import Change, CircuitBreaker
from rollart_core.rewards.stats import LOOK_S, RewardStats
from rollart_core.rewards.validation import checked_result, idempotency_key
from rollart_core.rollout.asyncio_tasks import retrieve_error
from rollart_core.rollout.time_limit import TimeLimit

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

Failed: TypeAlias = RewardFailure | DeadlineFailure
Outcome: TypeAlias = RewardResult | Failed

TRY_AGAIN_S: Final = 0.1
"""Interval to check whether an open circuit breaker allows a call, in seconds."""

OnEvent: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Event callback: receives a kind and plain JSON."""


@dataclass(slots=True)
class CallSlots:
    """A limit for concurrent calls."""

    num_free: int
    on_free: Callable[[], None] | None = None
    """Called when a slot becomes free."""

    def take(self) -> bool:
        """Acquire a slot. Return False if none is free."""
        if self.num_free < 1:
            return False
        self.num_free -= 1
        return True

    def give(self) -> None:
        """Release a slot."""
        self.num_free += 1
        if self.on_free is not None:
            self.on_free()


@dataclass(frozen=True, slots=True)
class BackendClientDependencies:
    """Objects that the clients of one reward share."""

    reward_id: str
    stats: RewardStats
    slots: CallSlots
    on_event: OnEvent
    hedge: Hedge | None = None


class BackendClient:
    """The client of one backend. See the module docstring.

    Args:
        name: Id of the backend.
        backend: The backend.
        breaker: Decides when the backend gets no calls. None means never.
        deps: Shared objects.
    """

    def __init__(
        self,
        name: str,
        backend: RewardBackend,
        breaker: CircuitBreaker | None,
        deps: BackendClientDependencies,
    ) -> None:
        self.name = name
        self.backend = backend
        self._breaker = breaker
        self._deps = deps

    @property
    def is_out(self) -> bool:
        """Whether the backend gets no calls, except trials."""
        return self._breaker is not None and not self._breaker.closed

    def wait_s(self) -> float:
        """Return the seconds until it may be called. 0 means now."""
        return self._breaker.wait_s(_now_s()) if self._breaker else 0.0

    async def ask(self, call: RewardCall) -> RewardAnswer:
        """Make a call.

        Raises:
            BackendFailure: If there is no answer.
            DeadlineFailure: If there is no answer in time.
            RewardFailure: If the reward raised it for the whole call.
        """
        trial = self._breaker.begin() if self._breaker else False
        late = f"no answer within {call.deadline_s:.3g} s"
        try:
            async with TimeLimit("reward.score", call.deadline_s, late):
                if self._deps.hedge is None:
                    with self._measured(call) as answers:
                        answers.append(await self.backend.invoke(call))
                else:
                    answers = [await self._raced(call)]
            (answer,) = answers
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

    async def _raced(self, call: RewardCall) -> RewardAnswer:
        calls: list[asyncio.Future[RewardAnswer]] = [asyncio.ensure_future(self._timed(call))]
        try:
            if await self._is_slow(calls[0]):
                calls.append(self._second(call))
            return await self._first_good(calls)
        finally:
            for one in calls:
                one.cancel()
                one.add_done_callback(retrieve_error)

    async def _timed(self, call: RewardCall) -> RewardAnswer:
        with self._measured(call) as answers:
            answers.append(await self.backend.invoke(call))
        return answers[0]

    @contextmanager
    def _measured(self, call: RewardCall) -> Iterator[list[RewardAnswer]]:
        """Measure a call. The block appends its answer.

        Raises:
            BackendFailure: If the block raises another error than a failure, or the answer does not
                have one result per request.
        """
        stats = self._deps.stats
        number = stats.begun(_now_s())
        answers: list[RewardAnswer] = []
        try:
            with boundary(BackendFailure, "reward.score"):
                yield answers
                found, wanted = len(answers[0].results), len(call.requests)
                if found != wanted:
                    raise BackendFailure(f"{found} results for {wanted} requests")
        except BaseException:
            stats.unanswered(number)
            raise
        stats.answered(number, _now_s(), answers[0].cost)

    async def _is_slow(self, call: asyncio.Future[RewardAnswer]) -> bool:
        """Wait until a call is slow and may be hedged (True), or has ended (False)."""
        hedge, began_s = self._deps.hedge, _now_s()
        while hedge is not None and not call.done():
            usual_s = self._deps.stats.slow_s(hedge.quantile, _now_s())
            left_s = LOOK_S
            if usual_s is not None:
                left_s = began_s + max(hedge.least_s, usual_s) - _now_s()
                if left_s <= 0 and self._may_hedge():
                    return True
            await asyncio.wait([call], timeout=left_s if left_s > 0 else LOOK_S)
        return False

    def _may_hedge(self) -> bool:
        hedge, counts = self._deps.hedge, self._deps.stats.counts
        assert hedge is not None
        first = counts["calls"] - counts["hedges"]
        return counts["hedges"] < hedge.max_share * first and self._deps.slots.take()

    def _second(self, call: RewardCall) -> asyncio.Future[RewardAnswer]:
        """Make the call again, in a slot that was acquired for it."""
        self._deps.stats.counts["hedges"] += 1
        self._say("reward_hedge", tickets=[r.ticket_id for r in call.requests])
        second = asyncio.ensure_future(self._timed(call))
        # Not in the call itself, which may be cancelled before it begins.
        second.add_done_callback(lambda _: self._deps.slots.give())
        return second

    async def _first_good(self, calls: Sequence[asyncio.Future[RewardAnswer]]) -> RewardAnswer:
        """Return the first answer. If there is none, raise the error of the first call."""
        waiting = set(calls)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                if one.exception() is None:
                    self._deps.stats.counts["hedges_won"] += one is not calls[0]
                    return one.result()
        return calls[0].result()

    # Results of its calls

    def _succeeded(self, trial: bool) -> None:
        if self._breaker:
            self._changed(self._breaker.succeeded(trial=trial), "it answers again")

    def _failed(self, error: Exception, trial: bool) -> None:
        self._deps.stats.counts["broken"] += 1
        if self._breaker:
            self._changed(self._breaker.failed(_now_s(), trial=trial), first_line(str(error)))

    def _changed(self, change: Change | None, why: str) -> None:
        if change is not None:
            self._say(f"reward_breaker_{change}", why=why)

    def _say(self, kind: str, **more: object) -> None:
        said = {"reward": self._deps.reward_id, "backend": self.name, **more}
        self._deps.on_event(kind, said)


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of retries."""

    reward_range: tuple[float, float]
    total_s: float
    """Maximum seconds of all attempts together."""
    try_s: float
    max_tries: int = 6
    backoff_s: float = 0.2
    max_backoff_s: float = 5.0


@dataclass(slots=True)
class _Open:
    """Requests that have no answer yet."""

    requests: dict[int, RewardRequest]
    ends_s: float
    errors: dict[int, tuple[BackendClient, Failed]]
    useless: set[BackendClient]
    """Backends for which retries are useless."""
    client: BackendClient
    """The backend of the last attempt."""
    num_tries: int = 0
    found: dict[int, Outcome] = field(default_factory=dict)
    is_unclear: bool = False
    """Whether one failed request may have caused the other failures. Then each is sent alone."""
    alone: list[_Open] = field(default_factory=list)

    @property
    def tickets(self) -> list[str]:
        return [request.ticket_id for request in self.requests.values()]

    def split(self) -> None:
        """Split the requests, all of which have failed, so that each is sent alone."""
        self.alone = [
            _Open(
                {i: request},
                self.ends_s,
                {i: self.errors[i]},
                set(self.useless),
                self.client,
                num_tries=self.num_tries,
            )
            for i, request in self.requests.items()
        ]
        self.requests.clear()


class RetryingScorer:
    """All attempts of one score. See the module docstring.

    Args:
        reward: The reward.
        clients: Its backends: the first one, then the fallbacks.
        rules: Limits of retries.
        stats: Statistics of the reward.
        on_event: Called for every retry, fallback and final failure.
    """

    def __init__(
        self,
        reward: RewardRef,
        clients: Sequence[BackendClient],
        rules: Rules,
        *,
        stats: RewardStats,
        on_event: OnEvent,
    ) -> None:
        self._reward = reward
        self._clients = clients
        self._rules = rules
        self._ledger = stats
        self._on_event = on_event

    def ask(self, requests: Sequence[RewardRequest]) -> Coroutine[Any, Any, dict[int, Outcome]]:
        """Return an awaitable of the outcome of each request, by its index."""
        ends_s = _now_s() + self._rules.total_s
        left = _Open(dict(enumerate(requests)), ends_s, {}, set(), self._clients[0])
        return self._answered(left, asyncio.Lock())

    async def _answered(self, left: _Open, turn: asyncio.Lock) -> dict[int, Outcome]:
        """Return an outcome for each open request. Calls are made while ``turn`` is held."""
        asked, found = dict(left.requests), left.found
        async for attempt in self._retrying(left):
            with attempt:
                async with turn:
                    may_ask = await self._may_ask(left)
                    if may_ask:
                        call = self._call_for(left)
                        try:
                            results = (await left.client.ask(call)).results
                        except (RewardFailure, DeadlineFailure) as e:
                            results = (e,) * len(call.requests)
                        self._take(results, call, left)
            outcome = attempt.retry_state.outcome
            if outcome is not None and not outcome.failed:
                attempt.retry_state.set_result(may_ask and bool(left.requests))
        found.update({index: self._given_up(index, left) for index in left.requests})
        named = {
            index: self._named(found[index], left.errors.get(index)) for index in sorted(found)
        }
        self._count([asked[index] for index in named], list(named.values()), left)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answered(one, turn)) for one in left.alone]
        return {**named, **{i: outcome for task in tasks for i, outcome in task.result().items()}}

    async def _may_ask(self, left: _Open) -> bool:
        """Select the backend of the next attempt. False if there is none, or no open request."""
        if left.is_unclear:
            left.split()
        if not left.requests or _now_s() >= left.ends_s:
            return False
        client = await self._free_backend(left)
        left.client = client or left.client
        return client is not None

    def _take(self, results: Sequence[Outcome], call: RewardCall, left: _Open) -> None:
        """Process the result of an attempt for each open request."""
        outcomes, client = self._outcomes(left, call, results), left.client
        left.num_tries += not client.is_out  # an outage does not count as an attempt of the request
        unclear = self._unclear(outcomes)
        left.is_unclear = bool(unclear)
        for index, outcome in outcomes.items():
            if index not in unclear and self._is_final(outcome, client, left):
                left.found[index] = outcome
                del left.requests[index]
            if not isinstance(outcome, RewardResult):
                left.errors[index] = (client, outcome)

    def _retrying(self, left: _Open) -> AsyncRetrying:
        """Return the retry policy: the wait before the next attempt, and whether to stop."""
        from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

        rules = self._rules
        backoff = wait_random_exponential(multiplier=rules.backoff_s, max=rules.max_backoff_s)

        def wait_s(state: RetryCallState) -> float:
            if left.client in left.useless:
                return 0.0
            state.attempt_number = max(1, left.num_tries)
            errors = [left.errors[index][1] for index in left.requests]
            asked_s = max((getattr(e, "wait_s", None) or 0.0 for e in errors), default=0.0)
            return max(backoff(state), asked_s)

        def is_over(state: RetryCallState) -> bool:
            spent = left.num_tries >= rules.max_tries
            return (
                spent and not left.client.is_out
            ) or _now_s() + state.upcoming_sleep >= left.ends_s

        def told(state: RetryCallState) -> None:
            self._ledger.counts["retries"] += 1
            why = first_line(str(left.errors[min(left.requests)][1]))
            wait_s = round(state.upcoming_sleep, 3)
            self._say("reward_retry", left.client, left, why=why, wait_s=wait_s)

        return AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_result(bool),
            stop=is_over,
            wait=wait_s,
            before_sleep=told,
            retry_error_callback=lambda _: False,
        )

    async def _free_backend(self, left: _Open) -> BackendClient | None:
        """Return the first backend that may be called. Wait for one until the time limit."""
        while True:
            able = [client for client in self._clients if client not in left.useless]
            for client in able:
                if client.wait_s() <= 0:
                    if client is not self._clients[0]:
                        self._ledger.counts["fallbacks"] += 1
                        self._say("reward_fallback", client, left)
                    return client
            if not able or _now_s() >= left.ends_s:
                return None
            wait_s = min(TRY_AGAIN_S, left.ends_s - _now_s(), *(client.wait_s() for client in able))
            await asyncio.sleep(max(0.001, wait_s))

    def _call_for(self, left: _Open) -> RewardCall:
        """Return the call for the open requests."""
        requests = tuple(left.requests.values())
        return RewardCall(
            requests,
            idempotency_key=idempotency_key(self._reward, requests),
            deadline_s=max(0.001, min(self._rules.try_s, left.ends_s - _now_s())),
            group=self._reward.group,
        )

    def _outcomes(
        self, left: _Open, call: RewardCall, results: Sequence[Outcome]
    ) -> dict[int, Outcome]:
        """Return the outcome of a call for each open request. A group fails as a whole."""
        outcomes = [self._checked(result) for result in results]
        failed = [outcome for outcome in outcomes if not isinstance(outcome, RewardResult)]
        if failed and call.group:
            return dict.fromkeys(left.requests, failed[0])
        return dict(zip(left.requests, outcomes, strict=True))

    def _checked(self, result: Outcome) -> Outcome:
        if isinstance(result, RewardFailure | DeadlineFailure):
            return result
        try:
            return checked_result(result, self._rules.reward_range)
        except RewardFailure as e:
            return e

    def _unclear(self, outcomes: Mapping[int, Outcome]) -> set[int]:
        """Return the requests whose failure may be caused by another request in their call."""
        failed = {i: one for i, one in outcomes.items() if not isinstance(one, RewardResult)}
        if self._reward.group or len(failed) < 2:
            return set()
        times = Counter(map(id, failed.values()))
        return {i for i, one in failed.items() if times[id(one)] > 1 or _is_hopeless(one)}

    def _is_final(self, outcome: Outcome, client: BackendClient, left: _Open) -> bool:
        """Return whether a retry, on this or another backend, cannot change the outcome."""
        if isinstance(outcome, BackendFailure):
            if _is_hopeless(outcome):
                left.useless.add(client)
            return all(client in left.useless for client in self._clients)
        return not isinstance(outcome, DeadlineFailure)

    def _given_up(self, index: int, left: _Open) -> Failed:
        if index in left.errors:
            return left.errors[index][1]
        return DeadlineFailure(
            f"no backend could be called within {self._rules.total_s:g} s: too many failures",
            boundary="reward.score",
        )

    def _named(self, outcome: Outcome, last: tuple[BackendClient, Failed] | None) -> Outcome:
        """Return a failure that names the reward and the backend."""
        if isinstance(outcome, RewardResult):
            return outcome
        client = last[0] if last else self._clients[0]
        message = f"reward {self._reward.id} on {client.name}: {outcome}"
        kind = DeadlineFailure if isinstance(outcome, DeadlineFailure) else RewardFailure
        named = kind(message, boundary=outcome.boundary, detail=outcome.detail)
        named.retryable = outcome.retryable
        return named

    def _count(
        self, requests: Sequence[RewardRequest], outcomes: Sequence[Outcome], left: _Open
    ) -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            failed = not isinstance(outcome, RewardResult)
            self._ledger.counts["failed" if failed else "scores"] += 1
            if failed:
                said = {"reward": self._reward.id, "tickets": [request.ticket_id]}
                why = first_line(str(outcome))
                self._on_event("reward_failed", {**said, "tries": left.num_tries, "why": why})

    def _say(self, kind: str, client: BackendClient, left: _Open, **more: object) -> None:
        said = {"reward": self._reward.id, "backend": client.name, "tickets": left.tickets}
        self._on_event(kind, {**said, "tries": left.num_tries, **more})


def _is_hopeless(outcome: Failed) -> bool:
    """Return whether a retry on the same backend is useless."""
    return isinstance(outcome, BackendFailure) and not outcome.again


def _now_s() -> float:
    return asyncio.get_running_loop().time()
