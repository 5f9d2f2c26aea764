"""The benchmark of weight channels, in its short form."""

import pytest

from rollart_core.bench import weights
from rollart_core.cli.bench import benchmarks


def test_it_is_listed():
    assert "weights" in benchmarks()
    assert "weight_sides" not in benchmarks()


@pytest.mark.slow
def test_every_channel_is_measured_and_what_arrives_is_what_was_published(monkeypatch):
    few = {name: weights.CHANNELS[name] for name in ("shared-memory", "delta over collective")}
    monkeypatch.setattr(weights, "CHANNELS", few)
    result = weights.run({"short": 1})
    rows = {row["case"].partition(", ")[2]: row for row in result["rows"]}
    assert [c for c in rows if c.endswith("stall of the engine per swap")] == [
        f"{name}: stall of the engine per swap" for name in few
    ]
    arrived = rows["delta: versions that arrived bit for bit"]
    assert arrived["ours"] == arrived["peer"] > 8
    marked = rows["delta after one AdamW update at lr 1e-06"]
    assert marked["ours"] < 0.3 * marked["peer"]
    assert [r["case"] for r in result["rows"] if r["meets_mark"] is False] == []
