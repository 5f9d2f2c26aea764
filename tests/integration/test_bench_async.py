"""The benchmark of asynchrony, in its short form."""

import json

import pytest

from rollart_core.bench import async_
from rollart_core.cli.bench import benchmarks


def test_its_name_is_async():
    assert {"async", "engine", "learn", "loop", "scale"} <= set(benchmarks())
    assert "async_" not in benchmarks()


def test_rows_pair_the_runs_of_a_round(monkeypatch):
    rates = iter([3.0, 2.0, 8.0, 4.0])
    asked_for = []

    def fake(function, asked):
        asked_for.append(asked["mode"])
        return {"trajectories_per_s": next(rates), "stalest": len(asked_for)}

    monkeypatch.setattr(async_, "in_fresh_process", fake)
    ratio, staleness = async_.run({"rounds": 2})["rows"]
    assert asked_for == ["async", "sync", "async", "sync"]
    assert ratio["ratio"] == {"min": 1.5, "median": 1.75, "max": 2.0}
    assert (ratio["ours"], ratio["peer"], ratio["meets_mark"]) == (5.5, 3.0, True)
    assert (staleness["ours"], staleness["meets_mark"]) == (3, False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_modes_run_and_async_stays_within_its_bound():
    result = async_.run({"short": True})
    ratio, staleness = result["rows"]
    assert ratio["ours"] > 0
    assert ratio["peer"] > 0
    assert staleness["meets_mark"]
    json.dumps(result)
