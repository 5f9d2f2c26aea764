"""Workloads as they are measured."""

from dataclasses import replace

import numpy as np
import pytest

from rollart_core.contracts.env import Workload
from rollart_core.runtime.workload import WorkloadMeter, departures, of_trajectory
from rollart_core.types import Failure, FailureKind, Sample, Task, Ticket, Trajectory, Turn


def trajectory(*turns: tuple[int, int, float], failed: bool = False) -> Trajectory:
    """Turns of (prompt tokens, new tokens, env seconds)."""
    made = tuple(Turn("", "", p, n, "stop", 0.0, 0.1, s) for p, n, s in turns)
    failure = Failure(FailureKind.TIMEOUT, "env.step", "late") if failed else None
    ticket = Ticket("g.0", Task("a/A-v1", "train", 0, 0), "g", 0)
    return Trajectory(ticket, "failed" if failed else "finished", turns=made, failure=failure)


def test_prefill_is_what_was_not_in_the_row_before():
    # 100 + 20 sampled, 30 of the next observation + 10 sampled: a row of 160 with 30 sampled
    seen = of_trajectory(trajectory((100, 20, 0.5), (150, 10, 1.5)))
    assert seen == Workload(prefill_tokens=65, decode_tokens=15, turns=2, env_s=1.0)
    assert of_trajectory(trajectory()) is None


def test_rows_are_measured_too():
    made = trajectory((100, 20, 0.5), (150, 10, 1.5))
    row = np.zeros(1, np.int32)
    several = replace(made, samples=(Sample(row, row, row, row, row),) * 3)
    assert of_trajectory(several).rows == 3
    meter = WorkloadMeter(Workload())
    meter.add(made)
    meter.add(several)
    assert meter.measured.rows == 2
    assert departures(Workload(rows=1), Workload(rows=25), 1.5) == ["rows 25 instead of 1"]


def test_means_weigh_turns_as_the_hardware_sees_them():
    meter = WorkloadMeter(Workload(reward_s=7.0))
    assert meter.measured == Workload(reward_s=7.0)
    meter.add(trajectory((100, 10, 0.0)))
    meter.add(trajectory((100, 10, 0.0), (110, 10, 0.0), (120, 10, 3.0)))
    meter.add(trajectory((1, 1, 0.0), failed=True))
    meter.add(trajectory())
    assert meter.count == 2
    assert meter.measured == Workload(50.0, 10.0, 2.0, 0.75, 7.0)


def test_a_mean_forgets():
    meter = WorkloadMeter(Workload(), decay=0.9)
    for _ in range(50):
        meter.add(trajectory((100, 10, 0.0)))
    for _ in range(50):
        meter.add(trajectory((100, 1000, 0.0)))
    assert meter.measured.decode_tokens == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (Workload(100, 50, 4, 0.1), []),
        (Workload(190, 50, 4, 0.1), []),
        (Workload(210, 50, 4, 0.1), ["prefill_tokens"]),
        (Workload(49, 101, 4, 0.1), ["prefill_tokens", "decode_tokens"]),
        (Workload(100, 50, 4, 0.21), ["env_s"]),
    ],
)
def test_leaving_the_declared_profile(measured, named):
    found = departures(Workload(100, 50, 4, 0.1), measured, 2.0)
    assert [phrase.split()[0] for phrase in found] == named


def test_small_differences_are_none_by_whatever_factor():
    assert not departures(Workload(env_s=0.0), Workload(env_s=0.009), 1.5)
    assert not departures(Workload(decode_tokens=1.0), Workload(decode_tokens=4.0), 1.5)
    assert departures(Workload(env_s=0.0), Workload(env_s=1.0), 1.5)
