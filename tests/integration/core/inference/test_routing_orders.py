"""The routing policy under any order of requests, releases, looks, deaths and returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart_core.contracts.inference import EngineStats, GenerateRequest
from rollart_core.inference.router import EngineState, Routes
from rollart_testing import ScriptedEngine

ENVS = ("a", "b")
POOLS = ("fast", "fast", "wide", "wide", "slow")
PLAN = {"a": {"fast": 0.6, "wide": 0.3, "slow": 0.1}, "b": {"wide": 1.0}}


@dataclass
class World:
    """Engines that answer at once, and what was seen of the policy."""

    routes: Routes = field(default_factory=Routes)
    live: dict[str, list[str]] = field(default_factory=dict)
    """Session -> [env, group]."""

    def __post_init__(self) -> None:
        for pool in POOLS:
            engine = ScriptedEngine()
            engine.pool = pool
            self.routes.engine_states.append(EngineState(engine))
        self.routes.plan(PLAN)

    def ask(self, session: str, env: str, group: str) -> EngineState | None:
        request = GenerateRequest(session, [1] * 8, 1, session, group, env_id=env)
        state = self.routes.state(request)
        if state is not None:
            state.num_turns += 1
        return state

    def look(self, at: int, waiting: int) -> None:
        self.routes.engine_states[at].look(
            EngineStats(num_waiting=waiting, num_running=waiting), 1.0
        )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(ENVS), st.integers(0, 5)),
        st.tuples(st.just("turn"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("back"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 4), st.sampled_from([0, 0, 3])),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_sessions_stay_where_their_cache_is_and_the_books_are_right(steps) -> None:
    world, number = World(), 0
    routes = world.routes
    for what, x, y in steps:
        sessions = list(routes.sessions)
        if what == "begin":
            number += 1
            state = world.ask(f"s{number}", x, f"{x}{y}")
            assert (state is None) == (not any(s.open for s in routes.engine_states))
        elif what == "turn" and sessions:
            session = sessions[x % len(sessions)]
            before, stolen = routes.sessions[session], routes.counts.num_stolen
            after = world.ask(session, "a", "")
            if after is not None:
                assert after.open
                kept = before.open and routes.counts.num_stolen == stolen
                assert not kept or after is before
                moved = routes.counts.num_stolen > stolen
                assert not moved or (before.num_waiting and not after.num_waiting)
        elif what == "end" and sessions:
            routes.release(sessions[x % len(sessions)])
        elif what in ("die", "back"):
            routes.engine_states[x].open = what == "back"
        elif what == "look":
            world.look(x, y)
        held = Counter(id(state) for state in routes.sessions.values())
        assert all(state.num_sessions == held[id(state)] for state in routes.engine_states)
    for session in list(routes.sessions):
        routes.release(session)
    assert not routes._groups
    assert not routes._group_of


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["fast", "wide", "slow"]), st.integers(1, 9), min_size=1),
    st.integers(1, 8),
)
def test_shares_are_met_within_a_group(weights, group_size) -> None:
    world = World()
    total = sum(weights.values())
    shares = {pool: weight / total for pool, weight in weights.items()}
    world.routes.plan({"a": shares})
    seen: Counter[str] = Counter()
    for n in range(240):
        state = world.ask(f"s{n}", "a", f"g{n // group_size}")
        assert state is not None
        seen[state.pool] += 1
        world.routes.release(f"s{n}") if n % 3 == 0 else None
        for pool, share in shares.items():
            assert abs(seen[pool] - share * (n + 1)) <= 2 * group_size
    assert set(seen) == set(shares)  # nobody starves


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 3])), max_size=30))
def test_nothing_is_stolen_unless_the_planned_pool_queues_and_another_idles(looks) -> None:
    world = World()
    for n, (at, waiting) in enumerate(looks):
        world.look(at, waiting)
        engine_states = world.routes.engine_states
        queues = all(s.queues for s in engine_states if s.pool == "wide")
        idles = any(s.idle for s in engine_states if s.pool != "wide")
        before = world.routes.counts.num_stolen
        world.ask(f"s{n}", "b", "")
        stolen = world.routes.counts.num_stolen > before
        assert not stolen or (queues and idles)
