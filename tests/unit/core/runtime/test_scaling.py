"""When parts join and leave, and how often the dead ones come back: no clock, no process."""

from __future__ import annotations

import pytest

from rollart_core.config.runtime import EngineScaling, EnvScaling
from rollart_core.runtime.remote import Restarts
from rollart_core.runtime.scaling import (
    ClusterLoad,
    Pressure,
    Scaler,
    engine_pressure,
    env_pressure,
)

HIGH, LOW, FINE = Pressure(True, False), Pressure(False, True), Pressure(False, False)


def decided(scaler: Scaler, count: int, pressures: list[tuple[float, Pressure]]) -> list[int]:
    counts = []
    for now_s, pressure in pressures:
        count = scaler.decide(now_s, count, pressure)
        counts.append(count)
    return counts


def test_pressure_must_last_before_anything_changes() -> None:
    looks = [(t, HIGH) for t in range(0, 11, 5)]
    assert decided(Scaler(1, 4, hold_s=10, cool_s=60), 1, looks) == [1, 1, 2]
    broken = [(0, HIGH), (5, FINE), (10, HIGH), (15, HIGH)]
    assert decided(Scaler(1, 4, hold_s=10, cool_s=60), 1, broken) == [1, 1, 1, 1]


def test_after_a_change_nothing_changes_for_a_while_and_then_one_at_a_time() -> None:
    looks = [(float(t), HIGH) for t in range(0, 41, 10)]
    assert decided(Scaler(1, 4, hold_s=10, cool_s=20), 1, looks) == [1, 2, 2, 3, 3]


def test_there_are_never_fewer_or_more_than_allowed() -> None:
    high = [(float(t), HIGH) for t in range(20)]
    assert max(decided(Scaler(1, 3, hold_s=0, cool_s=1), 2, high)) == 3
    low = [(float(t), LOW) for t in range(20)]
    assert min(decided(Scaler(2, 3, hold_s=0, cool_s=1), 3, low)) == 2


def test_high_and_low_in_turns_change_nothing() -> None:
    looks = [(float(t), HIGH if t % 2 else LOW) for t in range(50)]
    assert set(decided(Scaler(1, 4, hold_s=2, cool_s=1), 2, looks)) == {2}


ENGINES = EngineScaling(max=4, kv_above=0.9, kv_below=0.5, waiting_above=4)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([ClusterLoad(0.95, 0)], HIGH),
        ([ClusterLoad(0.1, 9), ClusterLoad(0.1, 0)], HIGH),
        ([ClusterLoad(0.1, 1)], FINE),
        ([ClusterLoad(0.1, 0), ClusterLoad(0.1, 0)], LOW),
        (
            [ClusterLoad(0.5, 0), ClusterLoad(0.5, 0)],
            FINE,
        ),  # one alone would be above its limit at once
        ([ClusterLoad(0.7, 0)], FINE),
        ([], FINE),
    ],
)
def test_engines_are_judged_by_kv_and_queue(loads: list[ClusterLoad], expected: Pressure) -> None:
    assert engine_pressure(ENGINES, loads) == expected


def test_env_workers_are_judged_by_their_episodes() -> None:
    limits = EnvScaling(max=4, episodes_above=10, episodes_below=6)
    assert env_pressure(limits, 20, 2) == HIGH
    assert env_pressure(limits, 14, 2) == FINE
    assert env_pressure(limits, 8, 2) == LOW
    assert env_pressure(limits, 12, 2) == FINE  # one alone would be above its limit at once


def test_a_part_comes_back_later_each_time_until_it_is_given_up() -> None:
    restarts = Restarts(most=3, window_s=100)
    assert [restarts.died(t) for t in (0.0, 1.0, 2.0)] == [0.0, 0.5, 1.0]
    assert restarts.died(3.0) is None


def test_old_deaths_do_not_count() -> None:
    restarts = Restarts(most=1, window_s=10)
    assert [restarts.died(t) for t in (0.0, 20.0, 40.0)] == [0.0, 0.0, 0.0]
    assert Restarts(most=0, window_s=10).died(0.0) is None
