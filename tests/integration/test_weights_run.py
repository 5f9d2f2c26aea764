"""Whole runs over the channels that the other run tests do not use."""

import json
from pathlib import Path

import pytest
from test_run import left_behind, run

from rollart_core.engine.audit import audit
from rollart_core.engine.journal_reader import JournalReader, read_trajectories


@pytest.mark.slow
def test_two_engines_over_delta_and_collective_with_restarts(tmp_path):
    report = run(
        tmp_path,
        runtime={"num_engines": 2},
        weights={"id": "delta", "over": {"id": "collective", "gather_s": 0.05}, "full_every": 3},
        rollout={
            "in_flight": "restart",
            "groups_per_batch": 2,
            "group_size": 4,
            "max_turns": 2,
            "max_new_tokens": 12,
            "max_context_tokens": 128,
        },
        stop={"batches": 5},
    )
    assert report.ok
    assert audit(Path(report.run_dir)).ok
    assert left_behind() == []
    assert set(report.weights) == {"engine", "engine-1"}
    for swaps in report.weights.values():
        assert swaps["num_swaps"] >= 3
        assert 0 < swaps["stall_s_max"] <= swaps["stall_s"]
        assert 0 < swaps["moved_bytes"]
    written = json.loads((Path(report.run_dir) / "report.json").read_text())
    assert written["weights"] == report.weights
    with JournalReader(Path(report.run_dir)) as journal:
        for name in ("engine/stall_s", "engine-1/fetch_s", "bytes", "moved_bytes"):
            assert list(journal.metrics(f"weights/{name}")), name
    for trajectory in read_trajectories(Path(report.run_dir)):
        for sample in trajectory.samples:
            for turn in set(sample.turn_ids[sample.loss_mask].tolist()):
                assert len(set(sample.policy_versions[sample.turn_ids == turn].tolist())) == 1
