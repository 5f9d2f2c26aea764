"""The modelled engine's time against cases worked out by hand, and the engine that waits so."""

import asyncio

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_core.contracts.inference import GenerateRequest
from rollart_core.errors import InferenceFailure
from rollart_planner.roofline import decode_bounds, prefill_bounds, turn_time
from rollart_testing.modelled_engine import EngineTime, ModelledEngine

# Weights are read in 1 s, whatever is decoded; a prompt's token takes 0.01 s.
MODEL = ModelShape(500, 1, 0, 0, 1)
POOL = Pool("p", "x", 1, flops_per_s=1e5, bytes_per_s=1e3)


def until_idle(engine: EngineTime) -> dict[str, float]:
    """Let time pass; returns when each request was done."""
    done: dict[str, float] = {}
    while (next_s := engine.next_s()) is not None:
        done |= dict(engine.advance(next_s))
    return done


def test_a_prompt_and_its_tokens():
    engine = EngineTime(MODEL, POOL)
    assert engine.next_s() is None
    assert engine.submit(10.0, "a", prompt=300, cached=0, new=5)
    # 300 x 2 x 500 / 1e5 = 3 s of prefill, which gives the first token; then 4 steps of 1 s
    assert until_idle(engine) == {"a": pytest.approx(17.0)}
    assert engine.busy_s == pytest.approx(7.0)
    assert engine.num_running == 0


def test_what_is_cached_is_not_computed_again():
    engine = EngineTime(MODEL, POOL)
    engine.submit(0.0, "a", prompt=300, cached=100, new=1)
    assert until_idle(engine) == {"a": pytest.approx(2.0)}


def test_rows_share_the_reading_of_the_weights():
    engine = EngineTime(MODEL, POOL)
    for key in "abc":
        engine.submit(0.0, key, prompt=100, cached=0, new=4)
    # a's prefill is on its way when b and c come, who then share theirs; a decodes with them
    assert until_idle(engine) == {key: pytest.approx(1 + 2 + 3) for key in "abc"}


def test_a_prompt_comes_in_between_two_steps():
    engine = EngineTime(MODEL, POOL)
    engine.submit(0.0, "a", prompt=100, cached=0, new=11)
    assert engine.next_s() == pytest.approx(1.0)
    assert engine.advance(1.0) == []
    assert engine.next_s() == pytest.approx(11.0)
    engine.submit(4.5, "b", prompt=200, cached=0, new=3)
    # a's step ends at 5, b is read until 7 and gives a token, both decode until 9; a is done at 14
    assert engine.next_s() == pytest.approx(5.0)
    assert until_idle(engine) == {"b": pytest.approx(9.0), "a": pytest.approx(13.0)}


def test_who_finds_no_capacity_waits():
    small = Pool("p", "x", 1, 1e5, 1e3, memory_bytes=10_000)
    model = ModelShape(500, 1, 1, 1, 2)  # 8 bytes of KV a token: room for 1000 tokens
    engine = EngineTime(model, small)
    assert not engine.submit(0.0, "giant", prompt=999, cached=0, new=2)
    engine.submit(0.0, "a", prompt=600, cached=0, new=10)
    engine.submit(0.0, "b", prompt=600, cached=0, new=10)
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    assert engine.kv_used == pytest.approx(0.61)
    done = until_idle(engine)
    assert done["b"] > 1.9 * done["a"]


def test_a_full_batch_lets_nobody_in():
    engine = EngineTime(MODEL, POOL, max_batch=2)
    for key in "abc":
        engine.submit(0.0, key, prompt=100, cached=0, new=3)
    done = until_idle(engine)
    assert done["c"] > done["b"] == done["a"]


def test_who_is_cancelled_takes_no_more_time():
    engine = EngineTime(MODEL, POOL)
    engine.submit(0.0, "a", prompt=100, cached=0, new=100)
    assert engine.cancel(0.5, "nobody") == 0
    assert engine.cancel(3.5, "a") == 1  # the run of steps it is in does not count before its end
    assert "a" not in until_idle(engine)
    engine.submit(200.0, "b", prompt=100, cached=0, new=1)
    assert until_idle(engine) == {"b": pytest.approx(201.0)}


def test_a_busy_engine_is_as_fast_as_the_roofline_says():
    model = ModelShape(8 * 10**9, 32, 32, 8, 128)
    pool = Pool("p", "H100", 1, 5e14, 2.3e12, 80 * 10**9)
    work = Workload(prefill_tokens=400, decode_tokens=100, turns=1)
    engine, batch, now, began, finished = EngineTime(model, pool), 32, 0.0, 0.0, 0
    for i in range(batch):  # not in step with one another
        engine.submit(0.0, f"{i}", prompt=400, cached=0, new=50 + 3 * i)
    while finished < 500:
        now = engine.next_s()
        for _ in engine.advance(now):
            finished += 1
            began = now if finished <= 100 else began
            engine.submit(now, f"x{finished}", prompt=400, cached=0, new=100)
    per_turn = turn_time(model, pool, work, batch).total_s
    assert (now - began) / (finished - 100) == pytest.approx(per_turn, rel=0.03)


def test_steps_are_those_of_the_roofline():
    model = ModelShape(8 * 10**9, 32, 32, 8, 128)
    pool = Pool("p", "H100", 1, 5e14, 2.3e12, 80 * 10**9)
    engine = EngineTime(model, pool)
    engine.submit(0.0, "a", prompt=1000, cached=200, new=2)
    prefill = max(prefill_bounds(model, pool, 800, 200))
    step = max(decode_bounds(model, pool, [1001.5]))
    assert until_idle(engine)["a"] == pytest.approx(prefill + step)


# The engine


FAST = Pool("p", "x", 1, flops_per_s=1e8, bytes_per_s=1e6)


def request(key: str, num_prompt: int, num_new: int) -> GenerateRequest:
    return GenerateRequest(key, [1] * num_prompt, num_new, session_id=key.split("/")[0])


def test_the_engine_waits_and_keeps_sessions():
    async def main():
        engine = ModelledEngine(MODEL, FAST, num_new=lambda r: 3)
        await engine.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = await engine.generate(request("s/0", 2000, 10))
        took = loop.time() - began
        second = await engine.generate(request("s/1", 2100, 3))
        await engine.load_weights(4)
        stats = await engine.stats()
        await engine.close()
        return first, took, second, stats

    first, took, second, stats = asyncio.run(main())
    assert took >= 0.022 - 0.001  # 20 ms of prefill, two steps of 1 ms
    assert (len(first.token_ids), first.finish_reason, first.num_cached_tokens) == (3, "stop", 0)
    assert (second.finish_reason, second.num_cached_tokens) == ("length", 2003)
    assert (stats.prefill_tokens, stats.cached_tokens, stats.policy_version) == (2097, 2003, 4)


def test_the_engine_lets_go_of_who_is_aborted_cancelled_or_too_long():
    async def main():
        engine = ModelledEngine(ModelShape(500, 1, 1, 1, 2), POOL_WITH_MEMORY)
        await engine.start()
        with pytest.raises(InferenceFailure, match="do not fit the device"):
            await engine.generate(request("x/0", 5000, 10))
        slow = asyncio.create_task(engine.generate(request("a/0", 100, 10)))
        other = asyncio.create_task(engine.generate(request("b/0", 100, 10)))
        waiting = asyncio.create_task(engine.generate(request("c/0", 100, 10)))
        await asyncio.sleep(0)
        await engine.abort(["a/0", "nobody"])
        aborted = await slow
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        await engine.close()
        await engine.close()
        with pytest.raises(InferenceFailure, match="closed"):
            await waiting
        return aborted

    assert asyncio.run(main()).finish_reason == "abort"


POOL_WITH_MEMORY = Pool("p", "x", 1, 1e5, 1e3, memory_bytes=10_000)
