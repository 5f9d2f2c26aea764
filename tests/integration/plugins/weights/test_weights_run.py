"""Whole runs over the channels that the other run tests do not use."""

import json
import os
import signal
from pathlib import Path

import pytest
from support.run_parts import part_pids
from support.whole_runs import left_behind, run, write

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.runtime.launch import launch
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories


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
        # The fifth batch is trained at version 4 and is at most one behind: 1, 2 and 3 have come.
        assert swaps["num_swaps"] >= 3
        assert 0 < swaps["stall_s_max"] <= swaps["stall_s"]
        assert swaps["moved_bytes"] > 0
    written = json.loads((Path(report.run_dir) / "report.json").read_text())
    assert written["weights"] == report.weights
    with JournalReader(Path(report.run_dir)) as journal:
        for name in ("engine/stall_s", "engine-1/fetch_s", "bytes", "moved_bytes"):
            assert list(journal.metrics(f"weights/{name}")), name
    for trajectory in read_trajectories(Path(report.run_dir)):
        for sample in trajectory.samples:
            for turn in set(sample.turn_ids[sample.loss_mask].tolist()):
                assert len(set(sample.policy_versions[sample.turn_ids == turn].tolist())) == 1


class Killer(NobodyWatches):
    """Kills a process of the run, by the name of its log, at some batch."""

    def __init__(self, runs: Path, at: dict[int, str]) -> None:
        self.runs, self.at = runs, at

    def progress(self, fraction, line):
        if part := self.at.pop(line.get("batch"), None):
            (run_dir,) = self.runs.iterdir()
            (pid,) = part_pids(run_dir)[part]
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_broadcast_gets_over_the_death_of_an_engine_and_of_the_trainer(tmp_path):
    killer = Killer(tmp_path / "runs", {1: "engine-1", 3: "trainer"})
    changes = {
        "runtime": {"num_engines": 2},
        "weights": {"id": "delta", "over": "collective"},
        "checkpoint": {"every_batches": 2},
        "stop": {"batches": 6},
    }
    report = launch(resolve_run(load_config(write(tmp_path, changes))), observer=killer)
    assert report.ok
    assert report.batches == 6
    assert not killer.at
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert len(checked.went_back) == 1
    assert left_behind() == []


def resolved(folder, weights):
    return resolve_run(load_config(write(folder, {"weights": weights})))


@pytest.mark.parametrize(
    ("weights", "reach"),
    [
        ("shared-memory", "machine"),
        ("disk", "folder"),
        ("collective", "network"),
        ("delta", "machine"),
        ({"id": "delta", "over": "disk"}, "folder"),
        ({"id": "delta", "over": {"id": "collective", "timeout_s": 5}}, "network"),
    ],
)
def test_a_channel_over_another_reaches_as_far_as_that(tmp_path, weights, reach):
    run = resolved(tmp_path, weights)
    assert run.weights.spec.reach == reach
    assert load_config_again(tmp_path, run).weights == run.weights


def load_config_again(folder, run):
    (folder / "again.yaml").write_text(run.to_yaml())
    return resolve_run(load_config(folder / "again.yaml"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"id": "delta", "over": "colective"}, r"weights.*over.*Did you mean 'collective'"),
        ({"id": "delta", "over": "delta"}, "is the delta channel itself"),
        ({"id": "collective", "backend": "mpi"}, r"weights\.backend"),
        ({"id": "disk", "bucket_bytes": 0}, r"weights\.bucket_bytes"),
    ],
)
def test_what_no_channel_can_do_is_refused_before_anything_starts(tmp_path, weights, said):
    with pytest.raises(ConfigError, match=said):
        resolved(tmp_path, weights)
