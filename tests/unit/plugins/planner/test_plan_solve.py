"""What a placement comes to when few episodes at once hold it down, against a modelled engine."""

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, ModelShape, Pool
from rollart_planner.fit import everywhere
from rollart_planner.roofline import turn_time
from rollart_planner.solve import steady_rate
from rollart_testing.modelled_engine import EngineTime

MODEL = ModelShape(8 * 10**9, 32, 32, 8, 128)
POOL = Pool("p", "H100", 1, 5e14, 2.3e12, 80 * 10**9)
READ, WRITE = Workload(2000, 16, 1, 0.0), Workload(100, 400, 1, 0.0)


def reckoned(num: int, most: float = 1e9) -> float:
    demand = Demand(model=MODEL, max_concurrent=num)
    found = everywhere({"r": READ, "w": WRITE}, [POOL], demand)
    shares = {"r": {"p": 1.0}, "w": {"p": 1.0}}
    return steady_rate(found, shares, {"p": 1}, most)


def modelled(num: int, turns: int) -> float:
    """Turns/s of an engine that always holds ``num`` rows, readers and writers in turn."""
    engine, now, at = EngineTime(MODEL, POOL), 0.0, {}

    def submit(key: int) -> None:
        work = (READ, WRITE)[key % 2]
        prompt, new = int(work.prefill_tokens), int(work.decode_tokens)
        engine.submit(now, str(key), prompt=prompt, cached=0, new=new)

    for key in range(num):
        submit(key)
    finished = num
    while finished < turns:
        now = engine.next_s()
        for _ in engine.advance(now):
            at[finished] = now
            submit(finished)
            finished += 1
    return (turns - turns // 2) / (at[turns - 1] - at[turns // 2 - 1])


@pytest.mark.parametrize("num", [8, 32, 64])
def test_readers_and_writers_on_one_engine(num):
    assert reckoned(num) == pytest.approx(modelled(num, 1200), rel=0.06)


def test_with_enough_episodes_nothing_is_taken_off():
    assert reckoned(100_000, most=3.0) == 3.0


def test_one_episode_at_a_time_is_as_fast_as_it_takes():
    alone = [turn_time(MODEL, POOL, work, 1).total_s for work in (READ, WRITE)]
    assert reckoned(1) == pytest.approx(1 / (sum(alone) / 2 + 0.0), rel=0.01)
