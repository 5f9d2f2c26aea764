"""Whole runs whose trainer is several ranks."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.run_parts import part_pids
from support.whole_runs import left_behind, write

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rank_pids(run_dir: Path) -> list[int]:
    """The processes that log to a trainer's file, in the order of their ranks."""
    parts = part_pids(run_dir)
    return [pid for name in sorted(parts) if name.startswith("trainer") for pid in parts[name]]


class RankKiller(NobodyWatches):
    """Kills the second rank when the third batch is trained; by then two checkpoints stand."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.killed: list[int] = []

    def progress(self, fraction: float, line: Mapping[str, float | str]) -> None:
        if line.get("batch") == 3 and not self.killed:
            (run_dir,) = self.runs.iterdir()
            assert (run_dir / "checkpoints" / "v000002" / "run_state.json").exists()
            self.killed = rank_pids(run_dir)
            os.kill(self.killed[1], signal.SIGKILL)


def test_a_run_with_two_trainer_ranks_gets_over_the_death_of_one(tmp_path):
    killer = RankKiller(tmp_path / "runs")
    changes = {
        "runtime": {"num_trainer_ranks": 2},
        "checkpoint": {"every_batches": 1},
        "stop": {"batches": 4},
    }
    report = launch(resolve_run(load_config(write(tmp_path, changes))), observer=killer)
    assert report.ok
    assert report.batches == 4
    run_dir = Path(report.run_dir)
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert len(checked.went_back) == 1
    with JournalReader(run_dir) as journal:
        assert {m.value >= 1.0 for m in journal.metrics("train/rank_imbalance")} == {True}
    assert len(killer.killed) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in killer.killed)
    assert not rank_pids(run_dir)
    assert not left_behind()
    assert (run_dir / "model-trained" / "model.safetensors").is_file()
