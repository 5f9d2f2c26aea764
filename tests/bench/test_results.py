"""The list of skips names what there is; the checks of the short forms catch what they are for."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.bench_results import (
    LANES,
    ROW_KEYS,
    SKIPPED,
    allowed_skips,
    faults_of,
    faults_of_skip,
    lane,
    unlisted_skips,
)

from rollart_bench import cli as bench
from rollart_bench import stability
from rollart_bench.cli import benchmarks
from rollart_bench.options import Options
from rollart_bench.rows import result, row
from rollart_core.store.estimates import Estimate


def _result() -> dict[str, Any]:
    rows = [
        row("a", 2.0, 1.0, "them", "x/s", ratios=[2.0, 1.5], mark=9.0),
        row("b", 0, None, None, "tickets", mark="0", meets_mark=True, required=True),
    ]
    return result("scale", rows)


def test_the_list_names_benchmarks_and_lanes_that_there_are() -> None:
    for skip in allowed_skips():
        assert skip.bench in benchmarks()
        assert skip.lanes
        assert set(skip.lanes) <= set(LANES)
        assert skip.says
        assert all(words.strip() for words in skip.says)
        assert skip.why.strip()


def test_what_benchmarks_give_has_the_form() -> None:
    assert list(faults_of("scale", _result())) == []
    assert list(_result()["rows"][0]) == list(ROW_KEYS)
    assert bench.SKIPPED == SKIPPED


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "not the object": lambda r: r.pop("machine"),
    "its name is": lambda r: r.update(name="scales"),
    "machine: ": lambda r: r.update(machine={}),
    "no rows": lambda r: r.update(rows=[]),
    "its keys": lambda r: r["rows"][0].pop("unit"),
    "must be texts": lambda r: r["rows"][0].update(case=" "),
    "ours is no figure": lambda r: r["rows"][0].update(ours=None),
    "peer is no figure": lambda r: r["rows"][0].update(peer=float("inf")),
    "or neither": lambda r: r["rows"][0].update(peer=None),
    "ratio": lambda r: r["rows"][0]["ratio"].update(min=float("nan")),
    "mark": lambda r: r["rows"][0].update(mark=[]),
    "meets_mark and required": lambda r: r["rows"][0].update(required=None),
    "a mark is met that there is not": lambda r: r["rows"][1].update(mark=None),
    "misses a mark": lambda r: r["rows"][1].update(meets_mark=False),
    "two rows of": lambda r: r["rows"][1].update(case="a"),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_what_has_another_form_is_found(fault: str) -> None:
    found = copy.deepcopy(_result())
    BREAKS[fault](found)
    assert any(fault in one for one in faults_of("scale", found))


def test_a_mark_of_speed_may_be_missed() -> None:
    found = _result()
    assert (found["rows"][0]["meets_mark"], found["rows"][0]["required"]) == (False, False)
    assert list(faults_of("scale", found)) == []


@pytest.mark.parametrize(
    "skip",
    [
        {"name": "loop", "skipped": "", "rows": []},
        {"name": "loop", "skipped": "why", "rows": [{}]},
        {"name": "engine", "skipped": "why", "rows": []},
        {"name": "loop", "rows": []},
        [],
    ],
)
def test_a_skip_that_says_no_reason_is_found(skip: object) -> None:
    assert list(faults_of_skip("loop", skip)) != []
    assert list(faults_of_skip("loop", {"name": "loop", "skipped": "why", "rows": []})) == []


@pytest.mark.parametrize(
    ("bench", "skips", "lane", "is_listed"),
    [
        ("loop", {"skipped": "trl is not installed"}, "bench", True),
        ("loop", {"skipped": "trl is not installed"}, "peers", False),
        ("loop", {"skipped": "it is broken"}, "bench", False),
        ("engine", {"skipped": "torch is not installed"}, "bench", False),
        ("adapters", {"skipped_cases": {"gem::a": "gem-llm is not installed"}}, "bench", True),
        ("adapters", {"skipped_cases": {"gym::a": "gem-llm is not installed"}}, "bench", False),
        ("adapters", {"skipped": "gem-llm is not installed"}, "bench", False),
        ("sandbox", {"skipped_cases": {"docker": "no Docker engine answers"}}, "docker", False),
        ("scale", {}, "bench", True),
    ],
)  # fmt: skip
def test_a_skip_that_is_not_listed_for_the_lane_is_found(
    bench: str, skips: dict[str, Any], lane: str, is_listed: bool
) -> None:
    assert (unlisted_skips(bench, skips, lane) == []) is is_listed


def test_without_a_lane_it_is_the_strict_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "ROLLART_LANE", raising=False)
    assert lane() == "bench"


def test_a_run_of_stability_that_has_ended_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []

    def train(arm, seed, path, keys):
        trained.append(list(keys))
        some = Estimate(0.95, 0.93, 0.97, 1200, 97)
        return stability.StabilityOutcome(
            *(arm, seed, "runs/x", True, "batches", 2390, 1, 2000),
            *(some, some, Estimate(0.0, -0.01, 0.01, 300, 97), (0.5, 1.0)),
        )

    monkeypatch.setattr(stability, "_train", train)
    kept = Options("stability", {"runs_dir": "kept"})
    first = stability._outcome(kept, "rate x 3", 1, tmp_path, ["trainer.lr=1"])
    assert stability._outcome(kept, "rate x 3", 1, tmp_path, ["trainer.lr=1"]) == first
    assert len(trained) == 1
    stability._outcome(kept, "rate x 3", 1, tmp_path, ["trainer.lr=2"])  # another run
    stability._outcome(kept, "rate x 3", 2, tmp_path, ["trainer.lr=2"])
    stability._outcome(Options("stability", {}), "rate x 3", 1, tmp_path, ["trainer.lr=2"])
    assert len(trained) == 4


def test_an_interrupted_run_ends_stability_and_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stability, "load_config", lambda path, keys: None)
    monkeypatch.setattr(stability, "resolve_run", lambda config, source: None)
    report = SimpleNamespace(stop_reason="interrupted", ok=False)
    monkeypatch.setattr(stability, "launch", lambda resolved, observer: report)
    with pytest.raises(KeyboardInterrupt):
        stability._outcome(Options("stability", {"runs_dir": "kept"}), "default", 0, tmp_path, [])
    assert list(tmp_path.glob("kept/*.json")) == []
