"""The benchmark of weight channels; ``tests/bench`` runs its short form."""

from rollart_bench.cli import benchmarks


def test_it_is_listed():
    assert "weights" in benchmarks()
    assert "waiting_reward" not in benchmarks()
