"""Many engines as one: shares, siblings, stealing, and engines that come, go and die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from support.clock import run_virtual

from rollart_core.contracts.hardware import Placement
from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    WeightSwap,
)
from rollart_core.errors import EngineDied, EnginesLost, InferenceFailure
from rollart_core.inference.router import EngineState, Router, Routes, combined, worth_moving
from rollart_testing import ScriptedEngine


class Mortal(ScriptedEngine):
    """An engine that dies on demand, as one in a process of its own would."""

    def __init__(self, pool: str = "local", **options: object) -> None:
        super().__init__(num_tokens=1, **options)  # type: ignore[arg-type]
        self.pool = pool
        self.dies = False
        self.versions: list[int] = []
        self.hangs_on_load = False
        self.killed = ""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self.dies:
            self.turn("down")
        if self.health != "up":
            raise EngineDied("the engine process is gone")
        return await super().generate(request)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        if self.hangs_on_load:
            await asyncio.Event().wait()
        if self.health != "up":
            raise EngineDied("the engine process is gone")
        self.versions.append(policy_version)
        return await super().load_weights(policy_version)

    def kill(self, reason: str) -> None:
        self.killed = reason
        self.turn("down")

    def turn(self, health: str) -> None:
        self.health = health  # type: ignore[assignment]
        if self.on_health is not None:
            self.on_health(self)


def request(session: str, *, group: str = "", env: str = "a", turn: int = 0) -> GenerateRequest:
    tokens = [1] * (10 + turn)
    return GenerateRequest(f"{session}/{turn}", tokens, 1, session, group, env_id=env)


async def started(*engines: ScriptedEngine) -> Sequence[ScriptedEngine]:
    for engine in engines:
        await engine.start()
    return engines


def placement(**shares: dict[str, float]) -> Placement:
    return Placement({}, shares, "local")


def routes(*pools: str) -> Routes:
    routes = Routes()
    for pool in pools:
        engine = ScriptedEngine()
        engine.pool = pool
        routes.engine_states.append(EngineState(engine))
    return routes


def sessions_by_pool(engines: Sequence[ScriptedEngine]) -> Counter[str]:
    found: Counter[str] = Counter()
    for engine in engines:
        found[engine.pool] += len({call.session_id for call in engine.calls})
    return found


def test_sessions_stay_and_siblings_sit_together_and_groups_spread() -> None:
    async def main() -> None:
        engines = await started(Mortal(), Mortal())
        router = Router(engines)
        for turn in range(3):
            for session in range(8):
                await router.generate(request(f"s{session}", group=f"g{session // 4}", turn=turn))
        for engine in engines:
            assert len({c.group_id for c in engine.calls}) == 1
            assert len({c.session_id for c in engine.calls}) == 4
        for session in range(8):
            await router.release(f"s{session}")
        assert [state.num_sessions for state in router.engine_states] == [0, 0]

    run_virtual(main())


def test_shares_are_kept_for_each_environment_and_replanned() -> None:
    async def main() -> None:
        engines = await started(Mortal("fast"), Mortal("fast"), Mortal("wide"))
        router = Router(engines)
        router.place(placement(a={"fast": 0.75, "wide": 0.25}, b={"wide": 1.0}))
        for n in range(40):
            await router.generate(request(f"a{n}", env="a"))
            await router.generate(request(f"b{n}", env="b"))
        assert router.counts.by_pool == {"a": {"fast": 30, "wide": 10}, "b": {"wide": 40}}
        assert abs(router.engine_states[0].num_sessions - router.engine_states[1].num_sessions) <= 1
        router.place(placement(a={"wide": 1.0}))
        for n in range(40, 60):
            await router.generate(request(f"a{n}", env="a"))
        assert router.counts.by_pool["a"] == {"fast": 30, "wide": 30}

    run_virtual(main())


def test_a_pool_that_is_away_is_done_without_and_not_flooded_afterwards() -> None:
    async def main() -> None:
        fast, wide = await started(Mortal("fast"), Mortal("wide"))
        router = Router([fast, wide])
        router.place(placement(a={"fast": 0.5, "wide": 0.5}))
        wide.turn("down")
        for n in range(20):
            await router.generate(request(f"s{n}"))
        assert sessions_by_pool([fast, wide]) == {"fast": 20, "wide": 0}
        wide.turn("up")
        for n in range(20, 40):
            await router.generate(request(f"s{n}"))
        assert sessions_by_pool([fast, wide]) == {"fast": 30, "wide": 10}

    run_virtual(main())


def stats(running: int = 0, waiting: int = 0, **more: float) -> EngineStats:
    return EngineStats(num_running=running, num_waiting=waiting, **more)


def test_a_new_session_is_stolen_only_when_its_pool_queues_and_another_idles() -> None:
    planned = {"a": {"fast": 1.0}}

    def seated(fast: EngineStats, wide: EngineStats) -> str:
        tried = routes("fast", "wide")
        tried.plan(planned)
        for state, said in zip(tried.engine_states, (fast, wide), strict=True):
            state.look(said, 1.0)
        state = tried.state(request("s"))
        assert state is not None
        assert tried.counts.num_stolen == (state.pool != "fast")
        return state.pool

    assert seated(stats(8, waiting=3), stats()) == "wide"
    assert seated(stats(8), stats()) == "fast"
    assert seated(stats(8, waiting=3), stats(1)) == "fast"
    assert seated(stats(8, kv_used=0.99), stats()) == "wide"


def test_siblings_of_a_stolen_session_follow_it() -> None:
    tried = routes("fast", "wide")
    tried.plan({"a": {"fast": 1.0}})
    tried.engine_states[0].look(stats(8, waiting=3), 1.0)
    tried.engine_states[1].look(stats(), 1.0)
    found = [tried.state(request(f"s{n}", group="g")) for n in range(4)]
    assert {state.pool for state in found if state} == {"wide"}
    assert tried.counts.num_stolen == 4


def test_a_later_turn_moves_only_when_its_prompt_is_computed_sooner_than_its_turn_comes() -> None:
    tried = routes("local", "local")
    here = tried.state(request("s"))
    assert here is not None
    other = next(state for state in tried.engine_states if state is not here)
    for state in (here, other):
        state.look(stats(), 1.0)
    here.num_turns = 10
    here.look(stats(8, waiting=5, prefill_tokens=1_000, busy_s=1.0), 1.0)
    other.look(stats(), 1.0)
    assert worth_moving(100, here, other)  # 0.5 s against 0.1 s
    assert not worth_moving(400, here, other)
    long = GenerateRequest("s/1", [1] * 400, 1, "s")
    assert tried.state(long) is here
    assert tried.state(request("s", turn=1)) is other
    assert (here.num_sessions, other.num_sessions) == (0, 1)
    assert tried.counts.num_stolen == 1
    assert tried.counts.recomputed_tokens == 11


def test_a_dead_engines_sessions_go_on_elsewhere_within_the_turn() -> None:
    async def main() -> None:
        engines = await started(Mortal(), Mortal())
        router = Router(engines)
        first = await router.generate(request("s", group="g"))
        dead, other = engines if engines[0].calls else engines[::-1]
        dead.dies = True
        again = await router.generate(request("s", group="g", turn=1))
        assert again.token_ids == first.token_ids  # the same key
        await router.generate(request("s2", group="g"))
        assert {c.session_id for c in other.calls} == {"s", "s2"}
        assert router.counts.num_moved == 1
        assert [s.num_running for s in router.engine_states] == [0, 0]

    run_virtual(main())


@pytest.mark.parametrize("first_back", ["sibling", "new"])
def test_siblings_stay_together_when_their_engine_closes(first_back: str) -> None:
    tried = routes("local", "local", "local")
    old = tried.state(request("s1", group="g"))
    assert old is tried.state(request("s2", group="g"))
    old.open = False
    first = tried.state(request("s3" if first_back == "new" else "s1", group="g", turn=1))
    assert first is not None
    assert first is not old
    for session in ("s1", "s2", "s3", "s4"):  # a third engine has less to do
        assert tried.state(request(session, group="g", turn=2)) is first


def test_a_request_that_kills_engines_kills_two_and_no_more() -> None:
    async def main() -> None:
        engines = await started(Mortal(), Mortal(), Mortal())
        for engine in engines:
            engine.dies = True
        router = Router(engines)
        with pytest.raises(InferenceFailure) as caught:
            await router.generate(request("s"))
        assert caught.value.retryable
        assert sum(engine.health == "up" for engine in engines) == 1

    run_virtual(main())


def test_requests_wait_for_an_engine_that_comes_back() -> None:
    async def main() -> None:
        (engine,) = await started(Mortal())
        router = Router([engine])
        engine.turn("down")
        waiting = asyncio.create_task(router.generate(request("s")))
        await asyncio.sleep(0)
        assert await router.load_weights(1) == []
        assert not waiting.done()
        engine.turn("up")
        assert (await waiting).token_ids

    run_virtual(main())


def test_when_no_engine_comes_back_everybody_hears_of_it() -> None:
    async def main() -> None:
        engines = await started(Mortal(), Mortal())
        router, told = Router(engines), []
        router.on_lost = told.append
        for engine in engines:
            engine.turn("down")
        waiting = asyncio.create_task(router.generate(request("s")))
        await asyncio.sleep(0)
        engines[0].turn("lost")
        assert not told
        engines[1].turn("lost")
        with pytest.raises(InferenceFailure, match="no inference engine is left"):
            await waiting
        with pytest.raises(EnginesLost):
            await router.load_weights(1)
        assert len(told) == 1

    run_virtual(main())


def test_an_engine_that_hangs_over_new_weights_is_given_up_and_holds_up_nobody() -> None:
    async def main() -> None:
        engines = await started(Mortal(), Mortal(), Mortal())
        engines[0].hangs_on_load = True
        engines[1].turn("down")
        router = Router(engines, load_limit_s=0.01)
        swaps = await router.load_weights(5)
        assert [s.policy_version for s in swaps] == [5]
        assert "did not load weights" in engines[0].killed
        assert engines[2].versions == [5]

    run_virtual(main())


def test_an_engine_that_joins_has_the_newest_weights_before_its_first_request() -> None:
    async def main() -> None:
        first, second = await started(Mortal(), Mortal())
        router = Router([first])
        await router.load_weights(3)
        for n in range(4):
            await router.generate(request(f"s{n}"))
        await router.add(second)
        assert second.versions == [3]
        for n in range(4, 12):
            await router.generate(request(f"s{n}"))
        assert [state.num_sessions for state in router.engine_states] == [6, 6]

    run_virtual(main())


def test_an_engine_that_leaves_answers_what_it_has_and_its_sessions_go_on_elsewhere() -> None:
    async def main() -> None:
        stays, leaves = await started(Mortal(), Mortal(latency_s=0.01))
        router = Router([leaves])
        running = asyncio.create_task(router.generate(request("s")))
        await asyncio.sleep(0)
        await router.add(stays)
        assert await router.remove(leaves)
        assert running.done()
        assert router.engines == [stays]
        await router.generate(request("s", turn=1))
        assert [c.session_id for c in stays.calls] == ["s"]
        await asyncio.sleep(0)
        assert leaves.num_calls["release"] == 1
        with pytest.raises(ValueError, match="last engine"):
            await router.remove(stays)
        await router.close()

    run_virtual(main())


def test_an_engine_that_does_not_finish_is_left_after_a_while() -> None:
    async def main() -> None:
        stays, leaves = await started(Mortal(), Mortal(latency_s=60.0))
        router = Router([leaves])
        running = asyncio.create_task(router.generate(request("s")))
        await asyncio.sleep(0)
        await router.add(stays)
        assert not await router.remove(leaves, drain_s=0.01)
        await leaves.close()
        with pytest.raises(InferenceFailure):
            await running

    run_virtual(main())


def test_counters_of_several_engines_add_up() -> None:
    each = EngineStats(1, 2, prefill_tokens=10, kv_used=0.5, extra={"steps": 3.0})
    both = combined([each, each])
    assert (both.num_running, both.prefill_tokens, both.kv_used) == (4, 20, 0.5)
    assert both.extra == {"steps": 6.0}
    assert combined([each]) is each
    assert combined([]) == EngineStats()
