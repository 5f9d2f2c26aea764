"""``in_flight: restart`` around the scripted engine: whose turns begin again, and whose do not."""

import asyncio

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.runtime.factories import RestartInFlight
from rollart_testing import ScriptedEngine


def serve(work, **options):
    """Run ``work(engine, wrapped)``; no request ends before the test lets it."""

    async def inside():
        engine = ScriptedEngine(**options)
        wrapped = RestartInFlight(engine)
        await wrapped.start()
        await wrapped.pause()
        try:
            return await work(engine, wrapped)
        finally:
            await wrapped.close()

    return asyncio.run(inside())


async def begin(engine, wrapped, name: str) -> asyncio.Task[GenerateResult]:
    before = len(engine._held)
    task = asyncio.create_task(wrapped.generate(GenerateRequest(name, [1, 2], 8)))
    while len(engine._held) == before:
        await asyncio.sleep(0)
    return task


def test_a_turn_under_a_swap_is_generated_again_with_the_new_version():
    async def work(engine, wrapped):
        tasks = [await begin(engine, wrapped, name) for name in ("a", "b")]
        swaps = [await wrapped.load_weights(version) for version in (1, 2)]
        await wrapped.resume()
        return swaps, [await t for t in tasks], await wrapped.stats(), engine.num_calls["generate"]

    swaps, results, stats, num_calls = serve(work)
    assert [s.num_restarted for s in swaps] == [2, 2]
    for result in results:
        assert result.finish_reason == "length"
        assert [(s.start, s.stop, s.policy_version) for s in result.spans] == [(0, 8, 2)]
    assert num_calls == 4, "the second swap came before they had begun again"
    assert stats.extra == {"restarted": 2.0, "dropped_tokens": 8.0}


def test_a_turn_without_a_token_yet_begins_again_too():
    async def work(engine, wrapped):
        task = await begin(engine, wrapped, "a")
        await wrapped.load_weights(1)
        await wrapped.resume()
        return await task

    result = serve(work, num_tokens=1)
    assert (result.finish_reason, len(result.token_ids)) == ("stop", 1)
    assert [s.policy_version for s in result.spans] == [1]


def test_what_nothing_comes_under_is_left_alone():
    async def work(engine, wrapped):
        await wrapped.resume()
        first = await wrapped.generate(GenerateRequest("a", [1], 8))
        swap = await wrapped.load_weights(1)
        return first, swap, await wrapped.generate(GenerateRequest("a", [1], 8))

    first, swap, second = serve(work)
    assert [r.spans[0].policy_version for r in (first, second)] == [0, 1]
    assert swap.num_restarted == 0


def test_a_turn_that_is_aborted_for_good_does_not_begin_again():
    async def work(engine, wrapped):
        aborted, cancelled = [await begin(engine, wrapped, name) for name in ("a", "b")]
        await wrapped.abort(["a", "unknown"])
        result = await aborted
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        swap = await wrapped.load_weights(1)
        return result, swap, engine.num_calls["generate"]

    result, swap, num_calls = serve(work)
    assert result.finish_reason == "abort"
    assert swap.num_restarted == 0
    assert num_calls == 2


def test_an_answer_of_two_versions_is_not_handed_on():
    """An engine may answer before it hears of the abort."""

    async def work(engine, wrapped):
        task = await begin(engine, wrapped, "a")
        await engine.load_weights(1)  # behind the wrapper's back: nothing is aborted
        await wrapped.resume()
        return await task

    assert [s.policy_version for s in serve(work).spans] == [1]
