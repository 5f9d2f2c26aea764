"""Every check must be able to fail: each is shown a plugin that breaks exactly its rule."""

import asyncio
from dataclasses import replace

import gymnasium
import pytest

from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardResult
from rollart_core.testing import (
    AsyncFakeEnv,
    FakeEnv,
    FakeGroupReward,
    FakeMapper,
    FakeReward,
    FakeSandbox,
    FakeTracker,
    Outcome,
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
from rollart_plugins.serverless.inline import InlineBackend

SPEC = EnvSpec(id="fake/Fake-v1", entry_point="rollart_core.testing:FakeEnv")


def by_outcome(results, outcome):
    return [r.name for r in results if r.outcome is outcome]


def failed(results):
    return by_outcome(results, Outcome.FAIL)


def test_fake_env_passes_and_says_what_was_skipped():
    results = check_env(FakeEnv, spec=SPEC)
    assert_checks(results)
    assert by_outcome(results, Outcome.SKIP) == ["async_agrees"]
    assert failed(check_env(FakeEnv())) == []
    assert by_outcome(check_env(AsyncFakeEnv), Outcome.SKIP) == []
    assert failed(check_env(lambda: FakeEnv(messages=True))) == []


def test_assert_checks_lists_the_failures():
    with pytest.raises(AssertionError, match="step: step's reward is nan"):
        assert_checks(check_env(lambda: FakeEnv(trouble="nan", at=0)))
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_checks([])


def changed(**methods):
    return type("Changed", (FakeEnv,), methods)


def bare_reset(self, **arguments):
    return "only the observation"


def number_observation(self, **arguments):
    return 5, {}


def four_tuple(self, action):
    return FakeEnv.step(self, action)[:4]


def text_reward(self, action):
    return (*FakeEnv.step(self, action)[:1], "1", False, False, {})


def int_flags(self, action):
    return (*FakeEnv.step(self, action)[:2], 0, 0, {})


def dice(self, action):
    import random

    observation, *rest = FakeEnv.step(self, action)
    return (f"{observation} {random.random()}", *rest)


def forgets_to_reset(self, **arguments):
    if self._turn == self.turns:
        return FakeEnv.reset(self, **arguments)
    return f"turn {self._turn}", {}


def chokes(self, action):
    int(action)


def double(self, action):
    observation, reward, *rest = FakeEnv.step(self, action)
    return (observation, 2 * reward, *rest)


def close_once(self):
    if self._closing.is_set():
        raise RuntimeError("closed twice")
    FakeEnv.close(self)


@pytest.mark.parametrize(
    ("methods", "check"),
    [
        ({"reset": bare_reset}, "reset"),
        ({"reset": number_observation}, "reset"),
        ({"step": four_tuple}, "step"),
        ({"step": text_reward}, "step"),
        ({"step": int_flags}, "step"),
        ({"num_tasks": lambda self, split: 0}, "tasks"),
        ({"step": dice}, "same_seed_same_episode"),
        ({"reset": forgets_to_reset}, "reset_in_the_middle"),
        ({"oracle": lambda self: "nonsense"}, "oracle_reaches_the_top"),
        ({"oracle": lambda self: None}, "oracle_reaches_the_top"),
        ({"step": chokes}, "garbage_actions"),
        ({"step": double}, "reward_in_range"),
        ({"corpus": lambda self: iter(())}, "corpus"),
        ({"close": close_once}, "close_twice"),
    ],
)
def test_check_env_finds(methods, check):
    assert check in failed(check_env(changed(**methods)))


def test_check_env_skips_what_is_said_to_be_random():
    results = check_env(changed(step=dice), spec=replace(SPEC, deterministic=False))
    assert "same_seed_same_episode" in by_outcome(results, Outcome.SKIP)
    assert failed(results) == []


def test_check_env_on_an_env_of_gymnasium_that_is_none_of_ours():
    results = check_env(lambda: gymnasium.make("CartPole-v1", disable_env_checker=True))
    assert {"reset", "step"} <= set(failed(results))


def test_check_reward():
    assert_checks(check_reward(FakeReward()))
    assert_checks(check_reward(FakeGroupReward()))
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

    assert failed(check_reward(Short())) == ["group_size"]


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
    assert_checks(check_inference_engine(ScriptedEngine))

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
