"""The reward service of a run: a queue for each reward, its backends, and waiting groups.

    episode --request--> scorer --> [groups: wait for all members] --> queue --> backend
       |                   |
       +-- its slot is free immediately (``on_played``)

Takes: a run's rewards and its section ``scoring``. Gives: a scorer for each environment, and the
cost of scoring. Never: builds a backend that no reward of the run needs, or decides the members of
a group (the scheduler does).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.config.scoring import Scoring
from rollart_core.contracts.reward import (
    Need,
    RewardBackend,
    RewardBackendSpec,
    RewardRef,
    RewardRequest,
    RewardResult,
    RewardSpec,
)
from rollart_core.errors import ConfigError, RewardFailure, UserError
from rollart_core.rewards.backend_client import (
    BackendClient,
    BackendClientDependencies,
    CallSlots,
    Failed,
    OnEvent,
    Outcome,
    RetryingScorer,
    Rules,
)
from rollart_core.rewards.circuit_breaker import CircuitBreaker
from rollart_core.rewards.stats import RewardStats
from rollart_core.rewards.validation import trimmed
from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done

Scorer: TypeAlias = Callable[[RewardRequest], Awaitable[RewardResult]]
OnPlayed: TypeAlias = Callable[[str, int], None]
"""Callback with the ticket and the attempt of an episode that only waits for its score."""

ScoreGroup: TypeAlias = Callable[[Sequence[RewardRequest]], Awaitable[list[RewardResult]]]


@dataclass(frozen=True, slots=True)
class RewardServicePlan:
    """The inputs of a reward service."""

    scoring: Scoring
    backends: Sequence[ResolvedPlugin[RewardBackendSpec]]
    """The first backend, and the fallback if there is one."""
    reward_s: float
    """Maximum seconds of all attempts of one score."""


class RewardService:
    """Scores the trajectories of all environments of a run. See the module docstring."""

    def __init__(self, plan: RewardServicePlan, on_event: OnEvent | None = None) -> None:
        """Create the service. Backends are built with the first scorer that needs them.

        Args:
            plan: The inputs of the service.
            on_event: Called for retries, hedges, fallbacks and failures.
        """
        self._plan = plan
        self._queues: dict[str, RewardQueue] = {}
        self._rewards: dict[str, ResolvedPlugin[RewardSpec]] = {}
        self._groups = WaitingGroups()
        self.on_event: OnEvent = _nobody if on_event is None else on_event
        self.on_played: OnPlayed | None = None
        """Releases the slot of an episode that waits for its score. None if groups do not wait."""

    def scorer(self, reward: ResolvedPlugin[RewardSpec] | None) -> Scorer:
        """Return the scorer of one environment's trajectories.

        Args:
            reward: Its reward. None means the return of the environment.

        Raises:
            UserError: If a backend, or a reward that runs in this process, cannot be built.
        """
        if reward is None:
            return _env_return
        return partial(self._score, self._queue_of(reward), reward.spec.group)

    async def open(self) -> None:
        """Check whether all backends can be called.

        Raises:
            ConfigError: If a backend cannot be called.
        """
        for queue in self._queues.values():
            await queue.open()

    async def close(self) -> None:
        """Stop everything. May be called twice."""
        await self._groups.close()
        for queue in self._queues.values():
            await queue.close()

    def score_group(self, ticket_ids: Sequence[str]) -> None:
        """Score the members of a group, which have all finished and wait."""
        self._groups.score(ticket_ids)

    def metrics(self) -> dict[str, float]:
        """Return the cost of scoring so far and the current load, by metric name."""
        return {
            f"scoring/{name}/{key}" if len(self._queues) > 1 else f"scoring/{key}": value
            for name, queue in self._queues.items()
            for key, value in {**queue.stats.numbers(), **queue.gauges()}.items()
        }

    def totals(self) -> dict[str, dict[str, float]]:
        """Return the cost of scoring: reward -> numbers."""
        return {name: queue.stats.numbers() for name, queue in self._queues.items()}

    def _score(
        self, queue: RewardQueue, group: bool, request: RewardRequest
    ) -> Awaitable[RewardResult]:
        heard = self.on_played if self._plan.scoring.overlap else None
        if heard is not None:
            heard(request.ticket_id, request.attempt)
            if group:
                return self._groups.wait(request, queue.score_group)
        return queue.score(request, whole=group)

    def _queue_of(self, reward: ResolvedPlugin[RewardSpec]) -> RewardQueue:
        """Return the queue of a reward. Rewards with the same options share one."""
        for name, known in self._rewards.items():
            if (known.spec.id, known.options) == (reward.spec.id, reward.options):
                return self._queues[name]
        alike = sum(known.spec.id == reward.spec.id for known in self._rewards.values())
        name = reward.spec.id + (f"#{alike + 1}" if alike else "")
        self._queues[name] = self._new_queue(reward)
        self._rewards[name] = reward
        return self._queues[name]

    def _new_queue(self, reward: ResolvedPlugin[RewardSpec]) -> RewardQueue:
        scoring, spec = self._plan.scoring, reward.spec
        try_s = scoring.try_s or self._plan.reward_s
        stats, slots = RewardStats(), CallSlots(scoring.max_concurrent)
        ref = RewardRef(spec.id, reward.options, spec.group)
        deps = BackendClientDependencies(spec.id, stats, slots, self._say, scoring.hedge)
        clients = [
            BackendClient(
                plugin.spec.id, _backend(plugin, reward, ref, try_s), _breaker(scoring), deps
            )
            for plugin in self._plan.backends
        ]
        rules = Rules(
            reward_range=spec.reward_range,
            total_s=self._plan.reward_s,
            try_s=try_s,
            max_tries=scoring.max_tries,
            backoff_s=scoring.backoff_s,
            max_backoff_s=scoring.max_backoff_s,
        )
        return RewardQueue(
            RewardQueueDependencies(
                reward_id=spec.id,
                clients=clients,
                retrying=RetryingScorer(ref, clients, rules, stats=stats, on_event=self._say),
                slots=slots,
                stats=stats,
                needs=spec.needs,
                batch_size=scoring.batch_size,
                batch_wait_s=scoring.batch_wait_s,
            )
        )

    def _say(self, kind: str, payload: Mapping[str, object]) -> None:
        self.on_event(kind, payload)


def _backend(
    plugin: ResolvedPlugin[RewardBackendSpec],
    reward: ResolvedPlugin[RewardSpec],
    ref: RewardRef,
    try_s: float,
) -> RewardBackend:
    given = reward.build() if plugin.spec.in_process else ref
    context = {"reward": given, "reward_range": reward.spec.reward_range, "timeout_s": try_s}
    try:
        made: RewardBackend = plugin.build(**context)
    except UserError as e:
        raise ConfigError(f"reward {ref.id} on {plugin.spec.id}: {e}") from e
    return made


def _breaker(scoring: Scoring) -> CircuitBreaker | None:
    rules = scoring.breaker
    return CircuitBreaker(rules.failures, rules.open_s) if rules else None


async def _env_return(request: RewardRequest) -> RewardResult:
    return RewardResult(request.env_return)


def _nobody(kind: str, payload: Mapping[str, object]) -> None:
    """Ignore the event."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    request: RewardRequest
    score: ScoreGroup
    result: asyncio.Future[RewardResult]


class WaitingGroups:
    """Members of groups that are scored together. Each waits until all have finished.

    member finished --> wait(request) ---------------------------------------+
    scheduler: all finished or lost --> score(ticket_ids) --> one result each
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def wait(self, request: RewardRequest, score: ScoreGroup) -> RewardResult:
        """Return the member's result after its group has been scored.

        Args:
            request: The request of the member.
            score: Scores its group.

        Raises:
            RewardFailure: If the group cannot be scored.
            DeadlineFailure: If scoring took too long.
        """
        member = _Member(request, score, asyncio.get_running_loop().create_future())
        self._members[request.ticket_id] = member
        try:
            return await member.result
        finally:
            if self._members.get(request.ticket_id) is member:
                del self._members[request.ticket_id]

    def score(self, ticket_ids: Sequence[str]) -> None:
        """Score these members, which all wait. Runs in the background."""
        members = [self._members[t] for t in ticket_ids if t in self._members]
        if members:
            keep_until_done(asyncio.ensure_future(_score(members)), self._calls)

    async def close(self) -> None:
        """Stop all scoring. May be called twice."""
        await cancel_and_wait(*self._calls)


async def _score(members: Sequence[_Member]) -> None:
    try:
        results = await members[0].score([member.request for member in members])
    except asyncio.CancelledError:
        for member in members:
            member.result.cancel()
        raise
    except Exception as e:
        for member in members:
            if not member.result.done():
                member.result.set_exception(e)
        return
    for member, result in zip(members, results, strict=True):
        if not member.result.done():
            member.result.set_result(result)


@dataclass(frozen=True, slots=True)
class RewardQueueDependencies:
    """The components of a queue."""

    reward_id: str
    clients: Sequence[BackendClient]
    retrying: RetryingScorer
    slots: CallSlots
    stats: RewardStats
    needs: Sequence[Need] | None = None
    batch_size: int = 1
    batch_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A pending score: one request, or a whole group."""

    requests: tuple[RewardRequest, ...]
    results: asyncio.Future[list[RewardResult]]
    since_s: float
    whole: bool


class RewardQueue:
    """The queue of one reward: requests wait for a slot, and share calls where possible.

        score(request) --> queue --> up to batch_size in a call, max_concurrent calls --> retrying
        score_group(requests) -^     (a group is one call)

    The deadline does not run while a request waits in the queue. No request fails because of
    another.
    """

    def __init__(self, deps: RewardQueueDependencies) -> None:
        self._deps = deps
        self._queue: deque[_Pending] = deque()
        self._calls: dict[asyncio.Task[dict[int, Outcome]], list[_Pending]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        deps.slots.on_free = self._pump

    @property
    def stats(self) -> RewardStats:
        """The cost of its scores."""
        return self._deps.stats

    async def open(self) -> None:
        """Check whether its backends can be called.

        Raises:
            ConfigError: If a backend cannot be called.
        """
        for client in self._deps.clients:
            try:
                await client.backend.open()
            except ConfigError as e:
                who = f"reward {self._deps.reward_id} on "
                raise ConfigError(f"{'' if who in str(e) else who + client.name + ': '}{e}") from e

    async def score(self, request: RewardRequest, *, whole: bool = False) -> RewardResult:
        """Score one trajectory.

        Args:
            request: The request of the trajectory.
            whole: Whether it is a complete group.

        Raises:
            RewardFailure: If it cannot be scored.
            DeadlineFailure: If scoring took too long.
        """
        with self._entered((request,), whole=whole) as results:
            return (await results)[0]

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score a whole group in one call.

        Raises:
            RewardFailure: If one of its members cannot be scored.
            DeadlineFailure: If scoring took too long.
        """
        with self._entered(tuple(requests), whole=True) as results:
            return await results

    def gauges(self) -> Mapping[str, float]:
        """Return the current gauges."""
        found = {"waiting": float(len(self._queue)), "in_flight": float(len(self._calls))}
        for client in self._deps.clients:
            found.update(client.backend.gauges())
        return found

    async def close(self) -> None:
        """Stop all calls and close the backends. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await cancel_and_wait(*self._calls)
        for asked in self._queue:
            asked.results.cancel()
        self._queue.clear()
        for client in self._deps.clients:
            await client.backend.close()

    @contextmanager
    def _entered(
        self, requests: tuple[RewardRequest, ...], *, whole: bool
    ) -> Iterator[asyncio.Future[list[RewardResult]]]:
        """Put requests into the queue. Remove them if the block is cancelled."""
        if self._closed:
            raise RewardFailure("scoring has ended", boundary="reward.score")
        loop = asyncio.get_running_loop()
        carried = tuple(trimmed(request, self._deps.needs) for request in requests)
        asked = _Pending(carried, loop.create_future(), loop.time(), whole)
        self._queue.append(asked)
        loop.call_soon(self._pump)  # so that requests that arrive together can share a call
        try:
            yield asked.results
        except asyncio.CancelledError:
            self._forget(asked)
            raise

    def _pump(self) -> None:
        """Make calls while there are free slots and pending requests."""
        while self._queue and not self._closed and self._ripe() and self._deps.slots.take():
            batch = [self._queue.popleft()]
            while self._queue and self._fits(batch, self._queue[0]):
                batch.append(self._queue.popleft())
            requests = [request for asked in batch for request in asked.requests]
            call = asyncio.create_task(self._deps.retrying.ask(requests))
            self._calls[call] = batch
            call.add_done_callback(self._ended)

    def _fits(self, batch: Sequence[_Pending], asked: _Pending) -> bool:
        return len(batch) < self._deps.batch_size and not (asked.whole or batch[0].whole)

    def _ripe(self) -> bool:
        """Return whether the next call can start without waiting for more requests."""
        wait_s, first = self._deps.batch_wait_s, self._queue[0]
        if not wait_s or first.whole or len(self._queue) >= self._deps.batch_size:
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

    def _ended(self, call: asyncio.Task[dict[int, Outcome]]) -> None:
        """Answer each request of a call and release its slot. On an internal error, fail all."""
        batch = self._calls.pop(call)
        error = None if call.cancelled() else call.exception()
        answered = not call.cancelled() and error is None
        outcomes = iter([call.result()[i] for i in sorted(call.result())] if answered else [])
        for asked in batch:
            if answered:
                _settle(asked, [next(outcomes) for _ in asked.requests])
            elif asked.results.done():
                continue
            elif error is None:
                asked.results.cancel()
            else:
                asked.results.set_exception(error)
        self._deps.slots.give()

    def _forget(self, asked: _Pending) -> None:
        """Remove a request without a waiter, or cancel its call if it has no other request."""
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
