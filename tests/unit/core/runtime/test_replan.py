"""Planning again: when a run's workloads have left its plan, and with what."""

from itertools import pairwise

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.runtime.placement import Replanner, as_built
from rollart_core.types import Task, Ticket, Trajectory, Turn

DECLARED = {"a/A-v1": Workload(100, 50, 1, 0.0), "b/B-v1": Workload(100, 50, 1, 0.0)}


def finished(env_id: str, num_new: int, env_s: float = 0.0) -> Trajectory:
    turn = Turn("", "", 100, num_new, "stop", 0.0, 0.1, env_s)
    return Trajectory(Ticket("g.0", Task(env_id, "s", 0, 0), "g", 0), "finished", turns=(turn,))


def departures(replanner: Replanner, env_id: str, num_new: int, n: int) -> list[tuple[int, object]]:
    seen = [(i, replanner.observe(finished(env_id, num_new))) for i in range(1, n + 1)]
    return [(i, departure) for i, departure in seen if departure is not None]


def test_what_stays_near_its_plan_is_never_planned_again():
    assert not departures(Replanner(DECLARED, min_trajectories=10), "a/A-v1", 70, 200)


def test_what_leaves_its_plan_is_planned_again_once():
    replanner = Replanner(DECLARED, min_trajectories=10)
    ((when, departure),) = departures(replanner, "a/A-v1", 200, 500)
    assert when == 10
    assert departure.why == ("a/A-v1: decode_tokens 200 instead of 50",)
    assert departure.workloads == {
        "a/A-v1": Workload(100, 200, 1, 0.0),
        "b/B-v1": DECLARED["b/B-v1"],
    }


def test_a_slow_drift_is_followed_by_few_plans():
    replanner = Replanner(DECLARED, factor=1.5, min_trajectories=50)
    whens = []
    for i in range(2000):
        if replanner.observe(finished("a/A-v1", 50 + i // 5)):
            whens.append(i)
    assert 3 <= len(whens) <= 6  # 50 to 450 tokens is 1.5 to the power of 5.4
    assert all(b - a >= 50 for a, b in pairwise(whens))


def test_back_and_forth_around_the_limit_is_not_answered_each_time():
    replanner = Replanner(DECLARED, factor=1.5, min_trajectories=20)
    plans = [replanner.observe(finished("a/A-v1", 74 if i // 40 % 2 else 78)) for i in range(800)]
    assert sum(p is not None for p in plans) <= 1


def test_strangers_and_too_few_are_not_believed():
    replanner = Replanner(DECLARED, min_trajectories=10)
    assert replanner.observe(finished("c/C-v1", 5000)) is None
    assert not departures(replanner, "a/A-v1", 5000, 9)


def test_a_factor_of_one_is_refused():
    with pytest.raises(ValueError, match="above 1"):
        Replanner(DECLARED, factor=1.0)


def test_a_running_run_has_its_pools_for_what_is_on_them():
    pools = [Pool("a", "H100", 8), Pool("b", "H20", 8), Pool("c", "cpu", 64), Pool("d", "L4", 8)]
    placement = Placement({"x": "c"}, {"x": {"a": 0.5, "b": 0.5}}, trainer="a")
    built = as_built(pools, placement, {"a": 4, "b": 2}, 1)
    assert {p.name: (p.count, p.roles) for p in built} == {
        "a": (5, ("engines", "trainer")),
        "b": (2, ("engines",)),
        "c": (64, ("envs",)),
    }
