import asyncio
import threading
from dataclasses import replace

import pytest

from rollart_core.errors import DeadlineFailure, RewardFailure
from rollart_plugins.serverless.inline import InlineBackend
from rollart_rewards.env_return import EnvReturn
from rollart_testing import FakeGroupReward, FakeReward, example_request


def backend(reward, **changes):
    return InlineBackend(reward, **{"reward_range": (0.0, 1.0), "timeout_s": 10.0, **changes})


def score(made, *requests):
    async def main():
        try:
            return await made.score(requests)
        finally:
            await made.close()

    return asyncio.run(main())


def test_env_return_weighs_and_shows_both_parts():
    result = EnvReturn(return_weight=0.5, success_weight=0.5).score(example_request(1.0))
    assert (result.value, dict(result.components)) == (1.0, {"return": 0.5, "success": 0.5})
    result = EnvReturn(return_weight=0.5, success_weight=0.5).score(example_request(0.5))
    assert (result.value, dict(result.components)) == (0.25, {"return": 0.25, "success": 0.0})


def test_an_unknown_success_is_an_error_only_when_it_counts():
    unknown = replace(example_request(0.5), success=None)
    assert EnvReturn().score(unknown).value == 0.5
    with pytest.raises(ValueError, match=r"info\['success'\]"):
        EnvReturn(success_weight=0.1).score(unknown)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(weight):
    with pytest.raises(ValueError, match="return_weight"):
        EnvReturn(return_weight=weight)


def test_inline_keeps_the_order():
    requests = [example_request(i / 100, index=i) for i in range(100)]
    results = score(backend(EnvReturn(), max_concurrent=4), *requests)
    assert [r.value for r in results] == [i / 100 for i in range(100)]


def test_inline_gives_a_group_reward_the_whole_group():
    results = score(backend(FakeGroupReward()), *(example_request(r) for r in (0.2, 0.9)))
    assert [r.value for r in results] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (FakeReward(error="no judge"), "RuntimeError: no judge"),
        (FakeReward(value=float("nan")), "the value nan"),
        (FakeReward(value=1.5), "1.5, outside its range 0 to 1"),
    ],
)
def test_a_bad_answer_is_a_typed_failure(reward, reason):
    with pytest.raises(RewardFailure, match=reason) as caught:
        score(backend(reward), example_request())
    assert caught.value.failure().kind == "reward"
    assert caught.value.boundary == "reward.score"


def test_something_that_is_no_result_is_a_failure():
    class Wrong(FakeReward):
        def score(self, request):
            return 0.5

    with pytest.raises(RewardFailure, match="a float, not a RewardResult"):
        score(backend(Wrong()), example_request())


def test_a_reward_that_hangs_is_given_up():
    wake = threading.Event()

    class Hangs(FakeReward):
        def score(self, request):
            wake.wait(30)
            return super().score(request)

    with pytest.raises(DeadlineFailure, match=r"longer than 0\.02 s"):
        score(backend(Hangs(), timeout_s=0.02), example_request())
    wake.set()


def test_no_more_than_max_concurrent_at_once():
    running, most, lock = 0, 0, threading.Lock()

    class Counts(FakeReward):
        def score(self, request):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            result = super().score(request)
            with lock:
                running -= 1
            return result

    made = backend(Counts(delay_s=0.002), max_concurrent=3)
    score(made, *(example_request(index=i) for i in range(12)))
    assert 1 <= most <= 3


def test_closed_means_closed():
    async def main():
        made = backend(FakeReward())
        await made.close()
        await made.close()
        await made.score([example_request()])

    with pytest.raises(RewardFailure, match="closed"):
        asyncio.run(main())
