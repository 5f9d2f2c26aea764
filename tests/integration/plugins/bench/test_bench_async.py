"""The benchmark of asynchrony; ``tests/bench`` runs its short form."""

from rollart_bench import async_
from rollart_bench.cli import benchmarks


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
