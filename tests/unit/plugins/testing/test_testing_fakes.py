import asyncio
import math
import threading

import numpy as np
import pytest
from support.clock import run_virtual
from support.pace import scaled

import rollart_testing as testing
from rollart_core.contracts.hardware import Pool
from rollart_core.contracts.inference import GenerateRequest
from rollart_core.contracts.reward import RewardRequest
from rollart_core.errors import InferenceFailure
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory
from rollart_testing import (
    AsyncFakeEnv,
    FakeAlgorithm,
    FakeEnv,
    FakeGroupReward,
    FakeMapper,
    FakeReward,
    FakeSandbox,
    FakeTracker,
    ScriptedEngine,
    keyed_script,
    text_script,
)


def request(request_id="r", *, prompt=(1, 2, 3), **changes):
    return GenerateRequest(request_id, prompt, **{"max_new_tokens": 8, **changes})


def test_all_is_sorted_and_true():
    assert testing.__all__ == sorted(testing.__all__)
    assert all(hasattr(testing, name) for name in testing.__all__)


def test_fake_env_plays_by_task_and_pays_right_answers():
    env, twin = FakeEnv(turns=7), FakeEnv(turns=7)
    observation, _ = env.reset(options={"task": 3})
    assert observation == twin.reset(seed=9, options={"task": 3})[0]
    total, done = 0.0, False
    while not done:
        _, reward, done, _, info = env.step(env.oracle())
        total += reward
    assert (total, info["success"], env.oracle()) == (1.0, True, None)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("red")


def test_fake_env_script_and_messages():
    env = FakeEnv(turns=3, script=["yes", "no"], messages=True)
    observation, _ = env.reset(seed=0)
    assert observation == [{"role": "user", "content": "turn 1 of 3: say yes"}]
    assert env.step("no")[1] == 0.0
    assert env.step("no")[1] == pytest.approx(1 / 3)
    assert env.oracle() == "yes"


def test_fake_env_raises_on_demand():
    with pytest.raises(RuntimeError, match="at reset"):
        FakeEnv(trouble="raise", at="reset").reset(seed=0)
    env = FakeEnv(trouble="raise", at=1)
    env.reset(seed=0)
    env.step("x")
    with pytest.raises(RuntimeError, match="at 1"):
        env.step("x")


def test_fake_env_nan_and_huge():
    env = FakeEnv(trouble="nan", at=0)
    env.reset(seed=0)
    assert math.isnan(env.step("x")[1])
    env = FakeEnv(trouble="huge", at="reset", huge_chars=12_345)
    assert len(env.reset(seed=0)[0]) == 12_345
    with pytest.raises(ValueError, match="no reward"):
        FakeEnv(trouble="nan", at="reset")


def test_fake_env_trouble_only_sometimes():
    env = FakeEnv(trouble="raise", at="reset", trouble_every=3)
    outcomes = []
    for _ in range(6):
        try:
            env.reset(seed=0)
            outcomes.append(True)
        except RuntimeError:
            outcomes.append(False)
    assert sum(outcomes) == 4
    env = FakeEnv(trouble="raise", at="reset", trouble_tasks=[2])
    env.reset(options={"task": 1})
    with pytest.raises(RuntimeError):
        env.reset(options={"task": 2})


def test_a_hang_ends_with_close():
    env = FakeEnv(trouble="hang", at=0)
    env.reset(seed=0)
    errors = []

    def step():
        try:
            env.step("x")
        except RuntimeError as e:
            errors.append(str(e))

    thread = threading.Thread(target=step)
    thread.start()
    env.close()
    thread.join(scaled(60))
    assert errors == ["the environment was closed while it hung"]


def test_an_async_hang_ends_with_close():
    async def main():
        env = AsyncFakeEnv(trouble="hang", at="reset")
        task = asyncio.create_task(env.areset(seed=0))
        await asyncio.sleep(0)
        assert not task.done()
        await asyncio.to_thread(env.close)
        with pytest.raises(RuntimeError, match="closed"):
            await task

    asyncio.run(main())


def test_async_env_plays_the_same_episode():
    async def main():
        env, twin = AsyncFakeEnv(delay_s=0.001), FakeEnv()
        assert await env.areset(seed=4) == twin.reset(seed=4)
        assert await env.astep("red") == twin.step("red")

    asyncio.run(main())


def test_delays_are_lognormal_with_that_mean():
    env = FakeEnv(delay_s=0.5, delay_sigma=0.5, delay_by="task", tasks=1500)
    delays = []
    for task in range(1500):
        env.reset(seed=0, options={"task": task})
        delays.append(env._delay())
    assert np.mean(delays) == pytest.approx(0.5, rel=0.08)
    assert np.std(np.log(delays)) == pytest.approx(0.5, rel=0.08)
    env.reset(seed=0, options={"task": 7})
    assert env._delay() == delays[7]


def test_siblings_wait_differently():
    env = FakeEnv(delay_s=0.5)
    delays = set()
    for _ in range(3):
        env.reset(seed=0, options={"task": 1})
        delays.add(env._delay())
    assert len(delays) == 3


def test_num_open_counts_each_close_once():
    before = FakeEnv.num_open()
    env = FakeEnv()
    assert FakeEnv.num_open() == before + 1
    env.close()
    env.close()
    assert FakeEnv.num_open() == before


def run_engine(main, **options):
    async def started():
        engine = ScriptedEngine(**options)
        await engine.start()
        await main(engine)
        await engine.close()

    run_virtual(started())


def test_scripted_engine_answers_cuts_and_stops():
    async def main(engine):
        result = await engine.generate(request(stop_token_ids=(0,)))
        assert (result.token_ids, result.finish_reason) == ([5, 6, 7, 0], "stop")
        result = await engine.generate(request(max_new_tokens=2, stop_token_ids=(0,)))
        assert (result.token_ids, result.finish_reason) == ([5, 6], "length")
        result = await engine.generate(request(stop_token_ids=(6,)))
        assert (result.token_ids, result.finish_reason) == ([5, 6], "stop")
        assert len(engine.calls) == engine.num_calls["generate"] == 3

    run_engine(main, script=lambda _: [5, 6, 7])


def test_made_up_answers_follow_from_the_key():
    script = keyed_script(num_tokens=5)
    assert script(request(sampling_key=7)) == script(request("other", sampling_key=7))
    assert script(request(sampling_key=7)) != script(request(sampling_key=8))


def test_text_script_sees_the_prompt():
    script = text_script(str.upper, decode=lambda ids: bytes(ids).decode(), encode=str.encode)
    assert bytes(script(request(prompt=b"abc"))) == b"ABC"


def test_a_swap_in_flight_splits_the_span():
    async def main(engine):
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.load_weights(3)
        spans = (await task).spans
        assert [(s.start, s.stop, s.policy_version) for s in spans] == [(0, 4, 0), (4, 8, 3)]

    run_engine(main, latency_s=0.005)


def test_pause_holds_resume_lets_go_and_abort_ends():
    async def main(engine):
        await engine.pause()
        held = asyncio.create_task(engine.generate(request("held")))
        ended = asyncio.create_task(engine.generate(request("ended")))
        await asyncio.sleep(0.01)
        assert not held.done()
        await engine.abort(["ended", "unknown"])
        result = await ended
        assert (len(result.token_ids), result.finish_reason) == (4, "abort")
        await engine.resume()
        assert (await held).finish_reason == "length"

    run_engine(main)


def test_resume_does_not_shorten_what_is_still_running():
    async def main(engine):
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.pause()
        await engine.resume()
        await asyncio.sleep(0.01)
        assert not task.done()
        await engine.abort(["r"])
        await task

    run_engine(main, latency_s=60.0)


def test_sessions_cache_until_released():
    async def main(engine):
        first = await engine.generate(request(session_id="s"))
        longer = request(session_id="s", prompt=(1, 2, 3, *first.token_ids, 9))
        assert (await engine.generate(longer)).num_cached_tokens == 3 + 8
        assert (await engine.stats()).num_sessions == 1
        await engine.release("s")
        assert (await engine.generate(request(session_id="s"))).num_cached_tokens == 0

    run_engine(main)


def test_refusals_are_typed():
    async def main(engine):
        with pytest.raises(InferenceFailure, match="exceed 4"):
            await engine.generate(request(prompt=(1,) * 5))
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        with pytest.raises(InferenceFailure, match="in flight already"):
            await engine.generate(request())
        await engine.close()
        with pytest.raises(InferenceFailure, match="closed"):
            await task
        with pytest.raises(InferenceFailure, match="closed"):
            await engine.generate(request("new"))

    run_engine(main, latency_s=5.0, max_context_tokens=4)


def test_sandbox_files_commands_and_snapshots():
    async def main():
        sandbox = FakeSandbox(files={"a": b"1"})
        with pytest.raises(RuntimeError, match="not up"):
            await sandbox.exec(["true"], timeout_s=1)
        await sandbox.start()
        name = await sandbox.snapshot()
        await sandbox.write_file("/a", b"2")
        assert (await sandbox.exec(["cat", "a"], timeout_s=1)).stdout == b"2"
        await sandbox.restore(name)
        assert await sandbox.read_file("a") == b"1"
        assert (await sandbox.exec(["sleep", "9"], timeout_s=1)).timed_out
        cut = await sandbox.exec(["echo", "long"], timeout_s=1, max_output_bytes=2)
        assert (cut.stdout, cut.truncated) == (b"lo", True)
        assert (await sandbox.exec(["nope"], timeout_s=1)).exit_code == 127

    asyncio.run(main())


def reward_request(env_return):
    return RewardRequest("g.0", "e", "train", 0, (), env_return, None)


def test_rewards():
    assert FakeReward().score(reward_request(0.25)).value == 0.25
    assert FakeReward(value=0.5).score(reward_request(0.25)).value == 0.5
    with pytest.raises(RuntimeError, match="broken"):
        FakeReward(error="broken").score(reward_request(0.25))
    results = FakeGroupReward().score_group([reward_request(x) for x in (0.1, 0.9, 0.1, 0.5)])
    assert [r.value for r in results] == [0.0, 1.0, 0.0, 0.5]


def test_algorithm_gives_a_row_a_sample():
    def trajectory(reward):
        mask = np.array([False, True, True])
        row = np.zeros(3)
        sample = Sample(np.arange(3, dtype=np.int32), mask, row, row, row)
        ticket = Ticket("g.0", Task("e", "train", 0, 0), "g", 0)
        return Trajectory(ticket, "finished", (sample,), reward=reward)

    group = Group("g", Task("e", "train", 0, 0), (trajectory(1.0), trajectory(0.0)), 2)
    rows = FakeAlgorithm().advantages([group], {})
    assert [row.tolist() for row in rows] == [[0, 0.5, 0.5], [0, -0.5, -0.5]]


def test_tracker_and_mapper():
    tracker = FakeTracker(fail_at=2)
    tracker.log({"train/loss": 1.0}, train_step=1, policy_version=0)
    with pytest.raises(OSError, match="train_step 2"):
        tracker.log({}, train_step=2, policy_version=0)
    assert tracker.rows == [(1, 0, {"train/loss": 1.0})]
    with pytest.raises(ValueError, match="no pool"):
        FakeMapper(pool="b").place({}, [Pool("a", "cpu", 1)])
