"""The scoring room: queue, tries, hedges, breaker, groups; no process, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.clock import run_virtual

from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.config.scoring import Breaker, Hedge, Scoring
from rollart_core.contracts.reward import (
    RewardAnswer,
    RewardBackend,
    RewardBackendSpec,
    RewardCall,
    RewardCost,
    RewardRef,
    RewardResult,
    RewardSpec,
)
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure
from rollart_core.rewards.circuit_breaker import CircuitBreaker
from rollart_core.rewards.service import RewardService, RewardServicePlan
from rollart_core.rewards.stats import RewardStats
from rollart_core.rewards.validation import idempotency_key, trimmed
from rollart_testing import FaultyBackend, example_request

FAKE = "rollart_testing:FakeReward"
MADE: list[ScriptedBackend] = []


@dataclass
class Poison:
    """A call fails as a whole if the second request is in it."""

    error: Exception


Step = Exception | float | str | Poison
"""What a scripted backend does with a call: raise, take seconds, or a word of its own."""


class ScriptedBackend(RewardBackend):
    """Does with each call what its script says, then answers the return."""

    def __init__(self, reward: RewardRef, *, script: Sequence[Any] = (), **context: Any) -> None:
        self.reward, self.script = reward, list(script)
        self.calls: list[RewardCall] = []
        self.closed = 0
        MADE.append(self)

    async def score(self, requests: Any) -> list[RewardResult]:
        return [RewardResult(r.env_return) for r in requests]

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        step = self.script[len(self.calls)] if len(self.calls) < len(self.script) else 0.0
        self.calls.append(call)
        if isinstance(step, Exception):
            raise step
        if step == "one fails":
            good = await self.score(call.requests)
            return RewardAnswer((RewardFailure("no verdict"), *good[1:]))
        if step == "half is late":
            good = await self.score(call.requests)
            return RewardAnswer((BackendFailure("busy"), *good[1:]))
        if step == "too large":
            good = await self.score(call.requests)
            refused = BackendFailure("too large", again=False)
            return RewardAnswer((refused, BackendFailure("busy"), *good[2:]))
        if isinstance(step, Poison):
            if any(r.env_return == 0.1 for r in call.requests):
                raise step.error
            return RewardAnswer(tuple(await self.score(call.requests)))
        if step == "short":
            return RewardAnswer(())
        if step == "nan":
            return RewardAnswer(tuple(RewardResult(float("nan")) for _ in call.requests))
        await asyncio.sleep(float(step))
        results = tuple(await self.score(call.requests))
        return RewardAnswer(results, RewardCost(cold=len(self.calls) == 1, billed_gb_s=0.5))

    async def close(self) -> None:
        self.closed += 1


class Told(list[tuple[str, Any]]):
    """What the room said."""

    def __call__(self, kind: str, payload: Any) -> None:
        self.append((kind, payload))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def plugin(kind: str, spec: Any, **options: Any) -> Any:
    return ResolvedPlugin(kind, spec, options, "test", "0")


def backend(*script: Any) -> Any:
    path = f"{__name__}:ScriptedBackend"
    spec = RewardBackendSpec(id=path, entry_point=path)
    return plugin("reward_backends", spec, script=script)


def reward(**spec: Any) -> Any:
    return plugin("rewards", RewardSpec(id=FAKE, entry_point=FAKE, **spec))


def run(
    use: Callable[[RewardService], Awaitable[Any]],
    *backends: Any,
    reward_s: float = 5.0,
    **given: Any,
) -> tuple[Any, Told]:
    """Return what ``use`` made of a room, and what the room said."""
    scoring = Scoring(**{"backoff_s": 0.001, "max_backoff_s": 0.002, **given})
    told = Told()
    MADE.clear()

    async def main() -> Any:
        service = RewardService(
            RewardServicePlan(scoring, backends or (backend(),), reward_s), told
        )
        try:
            return await use(service)
        finally:
            await service.close()

    return run_virtual(main()), told


def scores(service: RewardService, n: int = 1, **spec: Any) -> Awaitable[list[Any]]:
    score = service.scorer(reward(**spec))
    requests = [example_request(i / 10, index=i) for i in range(n)]
    return asyncio.gather(*(score(r) for r in requests), return_exceptions=True)


def values(results: Sequence[Any]) -> list[float]:
    return [round(result.value, 6) for result in results]


def test_without_a_reward_the_return_counts_and_nobody_is_asked() -> None:
    async def use(service: RewardService) -> Any:
        service.on_played = lambda ticket, attempt: pytest.fail("its place was never held")
        return await service.scorer(None)(example_request(0.3))

    result, _ = run(use)
    assert result.value == 0.3
    assert MADE == []


def test_requests_are_batched_and_answers_keep_their_order() -> None:
    results, _ = run(lambda service: scores(service, 7), batch_size=3, max_concurrent=2)
    assert values(results) == [i / 10 for i in range(7)]
    sizes = [len(call.requests) for call in MADE[0].calls]
    assert sum(sizes) == 7
    assert max(sizes) == 3
    assert len({call.idempotency_key for call in MADE[0].calls}) == len(sizes)


def test_a_call_waits_to_be_filled_but_not_for_ever() -> None:
    async def use(service: RewardService) -> Any:
        first = asyncio.ensure_future(scores(service))
        await asyncio.sleep(0)
        assert not MADE[0].calls
        return await first

    results, _ = run(use, batch_size=8, batch_wait_s=0.01)
    assert values(results) == [0.0]


def test_no_more_calls_at_once_than_there_are_places() -> None:
    path = "rollart_testing:FaultyBackend"
    faulty = plugin("reward_backends", RewardBackendSpec(id=path, entry_point=path), mean_s=0.001)

    async def use(service: RewardService) -> Any:
        score = service.scorer(reward())
        made = service._queues[FAKE]._deps.clients[0].backend
        assert isinstance(made, FaultyBackend)
        await asyncio.gather(*(score(example_request(index=i)) for i in range(12)))
        return made.num_most

    most, _ = run(use, faulty, max_concurrent=3)
    assert most == 3


def test_what_may_go_better_is_tried_again_and_every_retry_is_told() -> None:
    script = (BackendFailure("503"), ConnectionResetError("gone"), "short", 0.0)
    results, told = run(scores, backend(*script))
    assert values(results) == [0.0]
    assert told.kinds == ["reward_retry"] * 3
    assert [payload["why"] for _, payload in told] == [
        "503",
        "reward.score: ConnectionResetError: gone",
        "0 results for 1 requests",
    ]
    assert told[0][1]["tickets"] == ["group-0.0"]
    assert len({call.idempotency_key for call in MADE[0].calls}) == 1


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (RewardFailure("no verdict"), "no verdict"),
        (BackendFailure("403: forbidden", again=False), "403: forbidden"),
        ("nan", "the value nan"),
    ],
)
def test_what_will_not_go_better_fails_at_once_and_names_reward_and_backend(
    step: Any, said: str
) -> None:
    (failed,), told = run(scores, backend(step))
    assert isinstance(failed, RewardFailure)
    assert str(failed).startswith(f"reward {FAKE} on {__name__}:ScriptedBackend: ")
    assert said in str(failed)
    assert failed.failure().kind == "reward"
    assert len(MADE[0].calls) == 1
    assert told.kinds == ["reward_failed"]


def test_tries_come_to_an_end() -> None:
    (failed,), told = run(scores, backend(*[BackendFailure("503")] * 9), max_tries=3, breaker=None)
    assert isinstance(failed, RewardFailure)
    assert len(MADE[0].calls) == 3
    assert told.kinds == ["reward_retry", "reward_retry", "reward_failed"]


def test_only_what_is_open_is_asked_again() -> None:
    results, _ = run(lambda service: scores(service, 3), backend("half is late"), batch_size=3)
    assert values(results) == [0.0, 0.1, 0.2]
    assert [len(call.requests) for call in MADE[0].calls] == [3, 1]


def test_one_that_cannot_be_scored_does_not_fail_the_others() -> None:
    results, _ = run(lambda service: scores(service, 3), backend("one fails"), batch_size=3)
    assert isinstance(results[0], RewardFailure)
    assert values(results[1:]) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("error", "num_alone"),
    [
        (BackendFailure("500: broken"), 4),
        (BackendFailure("413: too large", again=False), 3),
        (DeadlineFailure("it hung"), 4),
        (RewardFailure("no verdict"), 3),
    ],
)
def test_one_that_fails_its_whole_call_does_not_fail_the_others(
    error: Exception, num_alone: int
) -> None:
    results, told = run(
        lambda service: scores(service, 3),
        backend(*[Poison(error)] * 9),
        batch_size=3,
        max_tries=3,
        breaker=None,
    )
    assert values([results[0], results[2]]) == [0.0, 0.2]
    assert str(error) in str(results[1])
    assert [len(call.requests) for call in MADE[0].calls] == [3] + [1] * num_alone
    assert told[0][1]["tickets"] == ["group-0.0", "group-0.1", "group-0.2"]
    assert [p["tickets"] for kind, p in told if kind == "reward_failed"] == [["group-0.1"]]


def test_what_is_too_large_does_not_fail_what_may_go_better() -> None:
    results, _ = run(lambda service: scores(service, 3), backend("too large"), batch_size=3)
    assert values(results) == [0.0, 0.1, 0.2]
    results, _ = run(
        lambda service: scores(service, 2),
        backend("too large", BackendFailure("too large", again=False)),
        batch_size=2,
    )
    assert "too large" in str(results[0])
    assert values(results[1:]) == [0.1]


def test_what_need_not_be_tried_again_stays_so() -> None:
    failure = RewardFailure("no verdict")
    failure.retryable = False
    (failed,), _ = run(scores, backend(failure))
    assert not failed.failure().retryable


def test_a_call_that_hangs_is_tried_again_within_the_deadline() -> None:
    results, told = run(scores, backend(60.0), try_s=0.02)
    assert values(results) == [0.0]
    assert "no answer within" in told[0][1]["why"]
    (failed,), _ = run(scores, backend(60.0, 60.0, 60.0), try_s=0.02, reward_s=0.05)
    assert isinstance(failed, DeadlineFailure)


def test_time_runs_from_the_first_try_on_and_not_in_the_queue() -> None:
    run(lambda service: scores(service, 4), backend(*[0.05] * 4), max_concurrent=1, reward_s=60)
    assert len(MADE[0].calls) == 4
    assert [call.deadline_s for call in MADE[0].calls] == [pytest.approx(60)] * 4


def test_a_slow_call_is_hedged_and_the_first_answer_counts() -> None:
    async def use(service: RewardService) -> Any:
        for _ in range(20):
            await scores(service)
        return await scores(service)

    script = [0.0] * 20 + [60.0, 0.0]
    hedge = Hedge(least_s=0.01, max_share=0.1)
    results, told = run(use, backend(*script), hedge=hedge)
    assert values(results) == [0.0]
    first, second = MADE[0].calls[-2:]
    assert first.idempotency_key == second.idempotency_key
    assert told.kinds == ["reward_hedge"]


def test_a_hedge_gives_its_place_back_however_it_ends() -> None:
    async def use(service: RewardService) -> Any:
        await scores(service, 20)
        await scores(service, 8)
        await asyncio.sleep(0.01)
        return service._queues[FAKE]._deps.slots.num_free

    hedge = Hedge(least_s=0.001, max_share=1)
    free, told = run(use, backend(*[0.0] * 20, *[0.02] * 8), hedge=hedge, max_concurrent=16)
    assert "reward_hedge" in told.kinds
    assert free == 16


def test_a_hedge_needs_a_free_place() -> None:
    async def use(service: RewardService) -> Any:
        for _ in range(20):
            await scores(service)
        return await scores(service)

    script = [0.0] * 20 + [0.05]
    _, told = run(use, backend(*script), hedge=Hedge(least_s=0.01), max_concurrent=1)
    assert told.kinds == []


def test_a_backend_that_fails_is_left_alone_and_the_other_one_asked() -> None:
    broken, other = backend(*[BackendFailure("503")] * 2), backend()
    breaker = Breaker(failures=2, open_s=60)
    results, told = run(lambda r: scores(r, 4), broken, other, breaker=breaker, max_concurrent=1)
    assert values(results) == [0.0, 0.1, 0.2, 0.3]
    assert [len(made.calls) for made in MADE] == [2, 4]
    assert told.kinds.count("reward_breaker_opened") == 1
    assert told.kinds.count("reward_fallback") == 4


def test_what_one_backend_cannot_take_at_all_goes_to_the_other() -> None:
    large = BackendFailure("7 MB is over the limit of 6 MB", again=False)
    results, told = run(scores, backend(large), backend())
    assert values(results) == [0.0]
    assert told.kinds == ["reward_retry", "reward_fallback"]


def test_an_outage_is_waited_out() -> None:
    outage = [ConnectionRefusedError("refused")] * 6
    breaker = Breaker(failures=2, open_s=0.01)
    results, told = run(
        lambda r: scores(r, 3), backend(*outage), breaker=breaker, max_tries=3, max_concurrent=3
    )
    assert values(results) == [0.0, 0.1, 0.2]
    assert told.kinds[-1] == "reward_breaker_closed"
    assert "reward_failed" not in told.kinds


def test_a_breaker_lets_one_trial_through() -> None:
    breaker = CircuitBreaker(2, 10.0)
    assert not breaker.begin()
    assert breaker.failed(0.0, trial=False) is None
    assert breaker.succeeded(trial=False) is None
    assert [breaker.failed(t, trial=False) for t in (0.5, 1.0)] == [None, "opened"]
    assert breaker.succeeded(trial=False) is None  # of a call that was made before
    assert breaker.failed(1.5, trial=False) is None
    assert breaker.wait_s(2.0) == 9.0
    assert breaker.wait_s(11.0) == 0.0
    assert breaker.begin()
    assert breaker.wait_s(11.0) > 0
    breaker.given_up(trial=False)
    assert breaker.wait_s(11.0) > 0
    assert breaker.failed(12.0, trial=True) is None
    assert breaker.wait_s(13.0) == 9.0
    assert breaker.begin()
    breaker.given_up(trial=True)
    assert breaker.wait_s(22.0) == 0.0
    assert breaker.begin()
    assert breaker.succeeded(trial=True) == "closed"
    assert breaker.wait_s(22.0) == 0.0


def test_a_place_is_free_as_soon_as_an_episode_has_played() -> None:
    async def use(service: RewardService) -> Any:
        played: list[tuple[str, int]] = []
        service.on_played = lambda ticket, attempt: played.append((ticket, attempt))
        await scores(service)
        return played

    assert run(use)[0] == [("group-0.0", 0)]
    assert run(use, overlap=False)[0] == []


def test_a_group_waits_until_it_is_asked_for_and_is_scored_whole() -> None:
    async def use(service: RewardService) -> Any:
        service.on_played = lambda ticket, attempt: None
        waiting = asyncio.ensure_future(scores(service, 3, group=True))
        await asyncio.sleep(0.001)
        assert not MADE[0].calls
        service.score_group([f"group-0.{i}" for i in range(3)])
        return await waiting

    results, _ = run(use, backend(BackendFailure("503")))
    assert values(results) == [0.0, 0.1, 0.2]
    assert [(len(c.requests), c.group) for c in MADE[0].calls] == [(3, True)] * 2


def test_a_group_fails_as_one_and_alone_it_is_scored_alone() -> None:
    async def use(service: RewardService) -> Any:
        service.on_played = lambda ticket, attempt: None
        waiting = asyncio.ensure_future(scores(service, 2, group=True))
        await asyncio.sleep(0)
        service.score_group(["group-0.0", "group-0.1", "not there"])
        return await waiting

    results, _ = run(use, backend("one fails"))
    assert [type(result) for result in results] == [RewardFailure] * 2
    results, _ = run(lambda service: scores(service, 2, group=True))
    assert values(results) == [0.0, 0.1]
    assert [len(c.requests) for c in MADE[0].calls] == [1, 1]


def test_a_group_that_loses_a_member_while_it_is_scored_gets_its_scores() -> None:
    async def use(service: RewardService) -> Any:
        service.on_played = lambda ticket, attempt: None
        score = service.scorer(reward(group=True))
        requests = [example_request(i / 10, index=i) for i in range(3)]
        members = [asyncio.ensure_future(score(request)) for request in requests]
        await asyncio.sleep(0.001)
        service.score_group([request.ticket_id for request in requests])
        while not MADE[0].calls:
            await asyncio.sleep(0.001)
        members[0].cancel()
        return await asyncio.gather(*members, return_exceptions=True)

    (lost, *scored), _ = run(use, backend(0.05))
    assert isinstance(lost, asyncio.CancelledError)
    assert values(scored) == [0.1, 0.2]
    assert [len(call.requests) for call in MADE[0].calls] == [3]


def test_nobody_waits_for_a_cancelled_trajectory() -> None:
    async def use(service: RewardService) -> Any:
        task = asyncio.ensure_future(scores(service, 2))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)
        return service._queues[FAKE].gauges()

    gauges, _ = run(use, backend(60.0, 60.0), max_concurrent=1)
    assert gauges == {"waiting": 0.0, "in_flight": 0.0}
    assert MADE[0].closed == 1


def test_requests_carry_what_the_reward_needs() -> None:
    whole = replace(example_request(0.5), context={"reference": "4", "tests": ["x"]})
    told = trimmed(whole, ("answer", "context"))
    assert [m["content"] for m in told.messages] == ["red"]
    assert (told.context, told.env_return, told.success) == (whole.context, 0.0, None)
    assert (told.ticket_id, told.num_turns, told.answer) == ("group-0.0", 1, "red")
    assert trimmed(whole, None) is whole
    ref = RewardRef("a/B-v1", {"x": 1})
    assert idempotency_key(ref, [whole]) == idempotency_key(ref, [replace(whole)])
    assert idempotency_key(ref, [whole]) != idempotency_key(ref, [told])
    assert idempotency_key(ref, [whole]) != idempotency_key(RewardRef("a/B-v1"), [whole])


def test_what_scores_cost_is_counted() -> None:
    async def use(service: RewardService) -> Any:
        await scores(service, 4)
        return service.metrics()

    numbers, _ = run(use, backend(BackendFailure("503")), max_concurrent=1)
    wanted = {"scores": 4, "calls": 5, "invocations": 5, "retries": 1, "failed": 0, "gb_s": 2.0}
    assert {key: numbers[f"scoring/{key}"] for key in wanted} == wanted
    assert numbers["scoring/cold_share"] == 0.0
    assert 0 <= numbers["scoring/p50_s"] <= numbers["scoring/p95_s"] < 1


def test_what_is_usual_is_estimated_with_the_calls_under_way() -> None:
    ledger = RewardStats()
    calls = [ledger.begun(0.0) for _ in range(100)]
    for call in calls[:19]:
        ledger.answered(call, 1.0, RewardCost())
    assert ledger.slow_s(0.5, 1.0) is None  # too few
    ledger.answered(calls[19], 1.0, RewardCost())
    assert ledger.slow_s(0.5, 1.0) is None  # 80 of 100 take longer, nobody knows how long
    for call in calls[20:60]:
        ledger.answered(call, 2.0, RewardCost())
    assert ledger.slow_s(0.5, 2.0) == 2.0
    for call in calls[60:96]:
        ledger.unanswered(call)
    assert ledger.slow_s(0.5, 2.05) == 2.0  # an estimate is good for a while
    assert ledger.slow_s(0.9, 3.0) == 2.0  # 4 left of 64
    assert ledger.slow_s(0.95, 4.0) is None
    assert ledger.quantile_s(0.5) == 2.0
