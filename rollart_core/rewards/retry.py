"""Asks for scores until there is one for each request, or no more point in asking.

    requests --> a backend that is not left alone --> answers: done
                    ^                                 the reward's own failure: done, failed
                    +-- wait, at random and longer <-- unreachable, too late, garbage
                        each time; what failed together is asked one by one from then on

Takes: requests of one call. Gives: for each a result, or the failure that says which reward and
which backend it was. Never: takes a failure for a score, or goes on after the common deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from rollart_core.contracts.reward import RewardCall, RewardRef, RewardRequest, RewardResult
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure, first_line
from rollart_core.rewards.backend_client import BackendClient, Tell
from rollart_core.rewards.stats import RewardStats
from rollart_core.rewards.validation import checked_result, idempotency_key

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

Failed: TypeAlias = RewardFailure | DeadlineFailure
Outcome: TypeAlias = RewardResult | Failed

LOOK_S: Final = 0.1
"""How often to look whether a backend that is left alone may be asked."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How often, and for how long."""

    reward_range: tuple[float, float]
    total_s: float
    """All tries together."""
    try_s: float
    max_tries: int = 6
    backoff_s: float = 0.2
    max_backoff_s: float = 5.0


@dataclass(slots=True)
class _Open:
    """Requests without an answer yet."""

    requests: dict[int, RewardRequest]
    ends_s: float
    errors: dict[int, tuple[BackendClient, Failed]]
    useless: set[BackendClient]
    """They will not do, however often they are asked."""
    client: BackendClient
    """Where they were asked last."""
    num_tries: int = 0
    found: dict[int, Outcome] = field(default_factory=dict)
    is_unclear: bool = False
    """Whether one that failed may have failed the others: each is asked alone from now on."""
    alone: list[_Open] = field(default_factory=list)

    @property
    def tickets(self) -> list[str]:
        return [request.ticket_id for request in self.requests.values()]

    def split(self) -> None:
        """Leave each request, all of which have failed, to be asked alone."""
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
    """See the module.

    Args:
        reward: Which reward.
        clients: Its backends: the first, and those to fall back to.
        rules: How often and how long.
        ledger: Counts.
        tell: Hears of every retry, fall-back and final failure.
    """

    def __init__(
        self,
        reward: RewardRef,
        clients: Sequence[BackendClient],
        rules: Rules,
        *,
        ledger: RewardStats,
        tell: Tell,
    ) -> None:
        self._reward = reward
        self._clients = clients
        self._rules = rules
        self._ledger = ledger
        self._tell = tell

    async def ask(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Return an outcome for each request, in order."""
        ends_s = _now_s() + self._rules.total_s
        left = _Open(dict(enumerate(requests)), ends_s, {}, set(), self._clients[0])
        found = await self._answered(left, asyncio.Lock())
        return [found[index] for index in sorted(found)]

    async def _answered(self, left: _Open, turn: asyncio.Lock) -> dict[int, Outcome]:
        """Return an outcome for each open request; whoever makes a call holds ``turn``."""
        asked, found = dict(left.requests), left.found
        await self._retrying(left)(self._try, left, turn)
        found.update({index: self._given_up(index, left) for index in left.requests})
        named = {
            index: self._named(found[index], left.errors.get(index)) for index in sorted(found)
        }
        self._count([asked[index] for index in named], list(named.values()), left)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answered(one, turn)) for one in left.alone]
        return {**named, **{i: outcome for task in tasks for i, outcome in task.result().items()}}

    async def _try(self, left: _Open, turn: asyncio.Lock) -> bool:
        """Make one call for what is open; return whether another one may help."""
        if left.is_unclear:
            left.split()
        if not left.requests:
            return False
        async with turn:
            client = await self._free_backend(left) if _now_s() < left.ends_s else None
            if client is None:
                return False
            left.client = client
            outcomes = await self._once(client, left)
        left.num_tries += not client.is_out  # an outage is not the fault of the request
        unclear = self._unclear(outcomes)
        left.is_unclear = bool(unclear)
        for index, outcome in outcomes.items():
            if index not in unclear and self._is_final(outcome, client, left):
                left.found[index] = outcome
                del left.requests[index]
            if not isinstance(outcome, RewardResult):
                left.errors[index] = (client, outcome)
        return bool(left.requests)

    def _retrying(self, left: _Open) -> AsyncRetrying:
        """Return the policy: how long to wait before the next try, and whether there is one."""
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
        """Return the first backend that may be asked; wait for one until time is up."""
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
            wait_s = min(LOOK_S, left.ends_s - _now_s(), *(client.wait_s() for client in able))
            await asyncio.sleep(max(0.001, wait_s))

    async def _once(self, client: BackendClient, left: _Open) -> dict[int, Outcome]:
        """Make one call for what is open; what fails as a whole fails each request."""
        indices = list(left.requests)
        requests = tuple(left.requests.values())
        call = RewardCall(
            requests,
            idempotency_key=idempotency_key(self._reward, requests),
            deadline_s=max(0.001, min(self._rules.try_s, left.ends_s - _now_s())),
            group=self._reward.group,
        )
        try:
            answer = await client.ask(call)
        except (RewardFailure, DeadlineFailure) as e:
            return dict.fromkeys(indices, e)
        outcomes = [self._checked(result) for result in answer.results]
        failed = [outcome for outcome in outcomes if not isinstance(outcome, RewardResult)]
        if failed and call.group:
            return dict.fromkeys(indices, failed[0])
        return dict(zip(indices, outcomes, strict=True))

    def _checked(self, result: Outcome) -> Outcome:
        if isinstance(result, RewardFailure | DeadlineFailure):
            return result
        try:
            return checked_result(result, self._rules.reward_range)
        except RewardFailure as e:
            return e

    def _unclear(self, outcomes: Mapping[int, Outcome]) -> set[int]:
        """Return the requests whose failure may be the fault of another one in their call."""
        failed = {i: one for i, one in outcomes.items() if not isinstance(one, RewardResult)}
        if self._reward.group or len(failed) < 2:
            return set()
        times = Counter(map(id, failed.values()))
        return {i for i, one in failed.items() if times[id(one)] > 1 or _is_hopeless(one)}

    def _is_final(self, outcome: Outcome, client: BackendClient, left: _Open) -> bool:
        """Whether asking again, there or elsewhere, cannot change it."""
        if isinstance(outcome, BackendFailure):
            if _is_hopeless(outcome):
                left.useless.add(client)
            return all(client in left.useless for client in self._clients)
        return not isinstance(outcome, DeadlineFailure)

    def _given_up(self, index: int, left: _Open) -> Failed:
        if index in left.errors:
            return left.errors[index][1]
        return DeadlineFailure(
            f"no backend could be asked within {self._rules.total_s:g} s: it failed too often",
            boundary="reward.score",
        )

    def _named(self, outcome: Outcome, last: tuple[BackendClient, Failed] | None) -> Outcome:
        """Return a failure that says which reward and which backend it was."""
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
                self._tell("reward_failed", {**said, "tries": left.num_tries, "why": why})

    def _say(self, kind: str, client: BackendClient, left: _Open, **more: object) -> None:
        said = {"reward": self._reward.id, "backend": client.name, "tickets": left.tickets}
        self._tell(kind, {**said, "tries": left.num_tries, **more})


def _is_hopeless(outcome: Failed) -> bool:
    """Whether the same backend will do no better when it is asked the same again."""
    return isinstance(outcome, BackendFailure) and not outcome.again


def _now_s() -> float:
    return asyncio.get_running_loop().time()
