"""Every check must be able to fail: each is shown a plugin that breaks exactly its rule."""

import asyncio
import os
from dataclasses import replace

import gymnasium
import pytest

from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardResult
from rollart_plugins.serverless.inline import InlineBackend
from rollart_testing import (
    AsyncFakeEnv,
    CheckOutcome,
    FakeEnv,
    FakeGroupReward,
    FakeMapper,
    FakeReward,
    FakeSandbox,
    FakeTracker,
    ScriptedEngine,
    assert_checks,
    check_env,
    check_inference_engine,
    check_mapper,
    check_reward,
    check_reward_backend,
    check_sandbox,
    check_tracker,
)

SPEC = EnvSpec(id="fake/Fake-v1", entry_point="rollart_testing:FakeEnv")


def by_outcome(results, outcome):
    return [r.name for r in results if r.outcome is outcome]


def failed(results):
    return by_outcome(results, CheckOutcome.FAIL)


def test_fake_env_passes_and_says_what_was_skipped():
    results = check_env(FakeEnv, spec=SPEC)
    assert_checks(results)
    assert by_outcome(results, CheckOutcome.SKIP) == ["async_agrees", "secrets_are_hidden"]
    given = check_env(FakeEnv())
    assert failed(given) == []
    assert {"interleaved_instances", "nothing_left_open"} < {*by_outcome(given, CheckOutcome.SKIP)}
    assert failed(check_env(AsyncFakeEnv, only=["make", "async_agrees"])) == []
    assert failed(check_env(lambda: FakeEnv(messages=True), only=["reset", "step", "tasks"])) == []


def test_assert_checks_lists_the_failures():
    with pytest.raises(AssertionError, match="step: step's reward is nan"):
        assert_checks(check_env(lambda: FakeEnv(trouble="nan", at=0), only=["step"]))
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_checks([])


def test_check_env_takes_an_id_and_a_choice_of_checks():
    results = check_env("frozenlake", only=["make", "tasks", "close_twice"])
    assert [(r.name, r.outcome) for r in results] == [
        ("make", CheckOutcome.PASS),
        ("tasks", CheckOutcome.PASS),
        ("close_twice", CheckOutcome.PASS),
    ]


def test_a_check_that_needs_a_failed_one_is_skipped():
    def chokes(self, action):
        raise ValueError(action)

    changed = type("Changed", (FakeEnv,), {"step": chokes})
    results = check_env(changed, only=["reset", "step", "corpus"])
    assert [r.outcome for r in results] == [CheckOutcome.PASS, CheckOutcome.FAIL, CheckOutcome.SKIP]
    assert results[-1].reason == "not judged while step fails"


def test_check_env_skips_what_is_said_to_be_random():
    class Dice(FakeEnv):
        def step(self, action):
            observation, *rest = super().step(action)
            return (f"{observation} {os.urandom(4).hex()}", *rest)

    random_spec = replace(SPEC, deterministic=False)
    names = ["same_seed_same_episode", "interleaved_instances", "same_verdict_twice"]
    results = check_env(Dice, spec=random_spec, only=names)
    assert by_outcome(results, CheckOutcome.SKIP) == names
    assert failed(check_env(Dice, spec=SPEC, only=names)) == ["same_seed_same_episode"]


def test_check_env_on_an_env_of_gymnasium_that_is_none_of_ours():
    def cart_pole():
        return gymnasium.make("CartPole-v1", disable_env_checker=True)

    assert failed(check_env(cart_pole, only=["make", "reset", "step"])) == ["reset"]


def test_check_reward():
    assert_checks(check_reward(FakeReward()))
    assert_checks(check_reward(FakeGroupReward()))
    (examples,) = [r for r in check_reward(FakeReward()) if r.name == "examples"]
    assert examples.reason == "the reward has no examples: add the optional method examples()"
    assert failed(check_reward(FakeReward(value=2.0))) == ["score"]
    assert failed(check_reward(FakeReward(value=float("nan")))) == ["score"]

    class Wavers(FakeReward):
        def score(self, request):
            super().score(request)
            return RewardResult(len(self.requests) % 2)

    assert failed(check_reward(Wavers())) == ["same_request_same_score"]

    class Short(FakeGroupReward):
        def score_group(self, requests):
            return [RewardResult(0.0)]

    assert failed(check_reward(Short())) == ["score", "group_size"]


def test_check_tracker(tmp_path):
    assert_checks(check_tracker(FakeTracker, tmp_path))
    assert failed(check_tracker(lambda: FakeTracker(fail_at=1), tmp_path)) == ["logs"]


def test_check_mapper():
    assert_checks(check_mapper(FakeMapper()))
    assert "places_everything" in failed(check_mapper(FakeMapper(pool="nowhere")))

    class Careless(FakeMapper):
        def place(self, workloads, pools):
            placement = super().place(workloads, [*pools, FakeMapper.spare])
            return replace(placement, engines={})

    from rollart_core.contracts.hardware import Pool

    FakeMapper.spare = Pool("spare", "cpu", 1)
    try:
        assert failed(check_mapper(Careless())) == ["places_everything", "refuses_no_pools"]
    finally:
        del FakeMapper.spare


def test_check_inference_engine():
    results = check_inference_engine(ScriptedEngine)
    assert_checks(results)
    assert by_outcome(results, CheckOutcome.SKIP) == ["score"]

    class Misjudges(ScriptedEngine):
        async def score(self, request):
            return [-99.0 for _ in request.positions]

    class Forgets(ScriptedEngine):
        async def release(self, session_id):
            pass

    class Overruns(ScriptedEngine):
        def _answer(self, request):
            return [*super()._answer(request), 1]

    class NeverPauses(ScriptedEngine):
        async def pause(self):
            pass

    assert failed(check_inference_engine(Forgets)) == ["session"]
    assert "generate" in failed(check_inference_engine(Overruns))
    assert failed(check_inference_engine(Misjudges)) == ["score"]
    assert "pause_abort_resume" in failed(check_inference_engine(NeverPauses))


def test_check_sandbox():
    assert_checks(check_sandbox(FakeSandbox))

    class Leaky(FakeSandbox):
        async def restore(self, snapshot):
            pass

        async def exec(self, argv, *, timeout_s, **further):
            further.pop("max_output_bytes", None)
            return await super().exec(argv, timeout_s=1e9, **further)

    assert failed(check_sandbox(Leaky)) == ["timeout", "output_cap", "snapshot"]


def test_check_reward_backend():
    def inline():
        return InlineBackend(FakeReward(), reward_range=(0.0, 1.0), timeout_s=10.0)

    assert_checks(check_reward_backend(inline))

    class Shuffles(InlineBackend):
        async def score(self, requests):
            await asyncio.sleep(0)
            return sorted(await super().score(requests), key=lambda r: r.value)

    results = check_reward_backend(
        lambda: Shuffles(FakeReward(), reward_range=(0.0, 1.0), timeout_s=10.0)
    )
    assert failed(results) == ["score"]
