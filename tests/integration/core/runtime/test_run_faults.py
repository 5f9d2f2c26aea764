"""A run whose trainer or controller is killed comes to what one comes to that is left alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import fork_server
from support.run_parts import part_pids
from support.whole_runs import losses, run, tokens, write

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import TrainerLost
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories

SAME = {
    "deterministic": True,
    "max_staleness": 0,
    "checkpoint": {"every_batches": 2},
    "stop": {"batches": 6},
    "failures": {"restart_window_s": 0.001},
}


class TrainerKiller(NobodyWatches):
    """Kills the trainer's process at these batches; 0: before the first, while it does nothing."""

    def __init__(self, runs: Path, at: set[int]) -> None:
        self.runs = runs
        self.at = at
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)

    def phase(self, name: str, detail: str) -> None:
        if name == "evaluate before" and 0 in self.at:
            self.kill()

    def progress(self, fraction: float, line: Mapping[str, float | str]) -> None:
        if line.get("batch") in self.at:
            self.at.discard(int(line["batch"]))
            self.kill()

    def kill(self) -> None:
        (run_dir,) = self.runs.iterdir()
        (pid,) = part_pids(run_dir)["trainer"]
        os.kill(pid, signal.SIGKILL)


def killed_trainer(folder: Path, at: set[int], **changes: object) -> tuple[RunReport, list[str]]:
    folder.mkdir()
    killer = TrainerKiller(folder / "runs", at)
    config = write(folder, {**SAME, **changes})
    return launch(resolve_run(load_config(config)), observer=killer), killer.told


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """What comes of it when it is left alone."""
    return run(tmp_path_factory.mktemp("plain"), **SAME)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two runs, and processes that start again
def test_a_trainer_that_is_killed_changes_no_loss(tmp_path: Path, plain: RunReport) -> None:
    # Before training, before the first checkpoint but that of version 0, right before one is taken.
    report, told = killed_trainer(tmp_path / "killed", {0, 1, 4})
    assert report.ok
    assert (report.batches, report.train_steps + report.skipped_updates) == (6, 6)
    assert report.rolled_back["batches"] >= 2
    assert sum("The trainer is lost" in text for text in told) == 3
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert len(checked.went_back) == 3
    assert losses(report) == losses(plain)
    assert any(loss != 0 for loss in losses(plain))


@pytest.mark.slow
@pytest.mark.timeout(300)  # two runs, and processes that start again
def test_a_controller_that_is_killed_changes_no_loss(tmp_path: Path, plain: RunReport) -> None:
    """When the third batch is trained, and the only checkpoints are those of versions 0 and 2."""
    process = fork_server.start_program(
        *("trained", "3", "run", str(write(tmp_path, {**SAME, "env": {"delay_s": 0.02}}))),
        target="support.lineage_run:killed_rollart",
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    (run_dir,) = (tmp_path / "runs").iterdir()
    report = launch(resolve_run(load_config(run_dir / "config.yaml")), resume=run_dir)
    assert report.ok
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert losses(report) == losses(plain)
    trained = {ticket for batch in trained_tickets(run_dir) for ticket in batch}
    assert trained == {t for batch in trained_tickets(Path(plain.run_dir)) for t in batch}
    assert {t: tokens(report)[t] for t in trained} == {t: tokens(plain)[t] for t in trained}


def trained_tickets(run_dir: Path) -> list[tuple[str, ...]]:
    with JournalReader(run_dir) as journal:
        return [b.ticket_ids for b in journal.batches() if b.state == "trained"]


@pytest.mark.slow
def test_redundant_members_are_cut_off_and_counted(tmp_path: Path) -> None:
    env = {"delay_s": 0.05, "delay_sigma": 1.5}
    report = run(tmp_path, env=env, rollout={"redundant": 2, "min_group_size": 4})
    assert report.ok
    assert not report.failures
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert (checked.trained, checked.failures) == (3 * 2 * 4, {})
    assert checked.aborted["redundant"] > 0
    cancelled = [t for t in read_trajectories(Path(report.run_dir)) if t.failure]
    assert {t.failure.kind.value for t in cancelled if t.failure} == {"cancelled"}
    assert checked.unrecorded == 0
    assert checked.length_bias["trained_tokens_mean"] > 0


@pytest.mark.slow
def test_a_trainer_that_dies_too_often_ends_the_run_and_everything_is_kept(tmp_path: Path) -> None:
    limits = {"max_restarts": 0, "restart_window_s": 600}
    with pytest.raises(TrainerLost, match=r"failures\.max_restarts \(0\) are used up"):
        killed_trainer(tmp_path / "a", {3}, failures=limits)
    (run_dir,) = (tmp_path / "a" / "runs").iterdir()
    report = launch(resolve_run(load_config(run_dir / "config.yaml")), resume=run_dir)
    assert report.ok
    assert audit(run_dir).ok
