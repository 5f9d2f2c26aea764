"""The engine's benchmark, on a model and loads so small that only its form is tested."""

from dataclasses import replace

import pytest

from rollart_bench.engine import SMALL, Duel, EngineLoad, _save_model
from rollart_bench.rows import machine, row


@pytest.fixture(scope="module")
def duel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = SMALL | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return Duel(_save_model(shape, "float32", str(folder)), str(folder), "float32", "tiny", 2)


def test_a_growing_conversation_is_measured_on_both_sides(duel):
    load = EngineLoad(3, turns=2, new_prompt_tokens=5, new_tokens=4)
    measured = duel.row(load, mark=1.0)
    assert measured["case"] == "tiny, 3 at once, 5 tokens in, 4 out, 2 turns"
    assert measured["ours"] > 0
    assert measured["peer"] > 0
    ratio = measured["ratio"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert measured["meets_mark"] == (ratio["median"] >= 1.0)


def test_agreement_with_the_peer_is_measured(duel):
    equal, far = replace(duel, pairs=1).agreement(3)
    assert (equal["ours"], equal["meets_mark"]) == (3, True)
    assert far["ours"] <= 1e-4
    assert far["meets_mark"]


def test_rows_are_the_json_form_of_all_benchmarks():
    assert list(row("case", 2.0, 1.0, "peer", "x/s", ratios=[3.0, 1.0, 2.0], mark=2.5)) == [
        "case", "ours", "peer", "peer_name", "unit", "ratio", "mark", "meets_mark", "required"
    ]  # fmt: skip
    one = row("case", 2.0, 1.0, "peer", "x/s", ratios=[3.0, 1.0, 2.0], mark=2.5)
    assert one["ratio"] == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert one["meets_mark"] is False
    assert row("case", 2.0, None, None, "x")["meets_mark"] is None
    assert {"cpu", "cores", "torch"} <= machine().keys()
