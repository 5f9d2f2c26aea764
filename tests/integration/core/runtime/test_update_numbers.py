"""Numbers of reports: no two metrics share one, whatever is skipped, undone or gone on with."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.lineage_run import ENV, NUM_TASKS, FakeEngines, FakeTrainer, episodes

from rollart_core.config.load import validate
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.contracts.weights import Publication
from rollart_core.errors import TrainerLost
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.store.journal_reader import JournalReader
from rollart_core.store.recorder import RunRecorder
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group

CONFIG = {
    "max_staleness": 0,
    "model": {"kind": "new"},
    "env": ENV,
    "trackers": [],
    "rollout": {"groups_per_batch": 2, "group_size": 2, "max_concurrent": 9},
    "failures": {"max_rate": 1.0},
    "checkpoint": {"every_batches": 2},
    "stop": {"batches": 5},
}


class CountingTrainer(FakeTrainer):
    """Takes two updates a batch, of which every third is skipped; lost at some batches."""

    def __init__(self, lost_at: tuple[int, ...] = ()) -> None:
        super().__init__(random.Random(0))
        self.lost_at = list(lost_at)
        self.tried = self.taken = 0
        self.shares: list[float | None] = []

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        if policy_version in self.lost_at:
            self.lost_at.remove(policy_version)
            raise TrainerLost("the trainer process is gone")
        self.shares.append(progress)
        reports = []
        for _ in range(2):
            self.tried += 1
            updated = self.tried % 3 != 0
            self.taken += updated
            metrics = {"updated": float(updated), "loss": 0.5}
            reports.append(TrainStepReport(self.taken, policy_version, metrics))
        return reports

    async def publish(self, policy_version: int) -> Publication:
        return Publication(policy_version, 0, 0.0)


def resolved(**changes: object) -> ResolvedRun:
    config, problems = validate({**CONFIG, **changes})
    assert config is not None
    assert not problems
    return resolve_run(config)


async def live(run: ResolvedRun, folder: Path, trainer: CountingTrainer) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    recorder = RunRecorder(run, folder, NobodyWatches())
    recorder.start()
    engines = FakeEngines()
    resumes = bool(list(folder.glob("checkpoints/v*/run_state.json")))
    state = await recorder.checkpoints.load_newest(trainer.call) if resumes else None
    engines.version = state.policy_version if state else 0
    source = TaskSource(ENV, "train", NUM_TASKS, 0)
    played = episodes(engines, random.Random(0), 0.0)
    phase = TrainPhase(run, TrainDependencies(recorder, trainer, engines, played, source))
    try:
        await phase.prepare(state)
        await phase.execute(state)
    finally:
        recorder.close({})
    return recorder.totals()


def test_every_report_has_a_number_of_its_own_and_only_updates_count(tmp_path: Path) -> None:
    totals = asyncio.run(live(resolved(), tmp_path, CountingTrainer(lost_at=(3,))))
    assert totals["rolled_back"] == {"batches": 1, "train_steps": 1, "trajectories": 4}
    # Versions 0, 1, 2 (undone), 2, 3, 4: reports 3, 6, 9 and 12 of 12 are skipped, 6 is undone.
    assert (totals["train_steps"], totals["skipped_updates"]) == (7, 3)
    again = CountingTrainer()
    again_totals = asyncio.run(live(resolved(stop={"batches": 7}), tmp_path, again))
    # Its totals are those of both processes.
    assert again_totals["rolled_back"] == totals["rolled_back"]
    assert (again_totals["train_steps"], again_totals["skipped_updates"]) == (10, 4)
    with JournalReader(tmp_path) as journal:
        rows = journal.metrics("train/loss", rolled_back=True)
        standing = journal.metrics("train/updated")
        assert journal.last_train_step() == 16
    assert [r.train_step for r in rows] == list(range(1, 17))
    assert [r.train_step for r in rows if r.rolled_back] == [5, 6]
    assert [r.policy_version for r in standing] == [n for n in range(7) for _ in range(2)]
    assert sum(r.value or 0 for r in standing) == 10


def test_a_schedule_over_stop_is_given_the_used_share_of_it(tmp_path: Path) -> None:
    schedule = {"schedule": {"kind": "linear", "over": "stop"}}
    trainer = CountingTrainer()
    asyncio.run(live(resolved(trainer=schedule), tmp_path / "a", trainer))
    assert trainer.shares == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    trainer = CountingTrainer()
    asyncio.run(live(resolved(), tmp_path / "b", trainer))
    assert trainer.shares == [None] * 5


def test_the_used_share_is_of_batches_or_time_whichever_is_more() -> None:
    run = resolved(stop={"batches": 10, "wall_s": 1000})
    phase = TrainPhase(run, TrainDependencies(None, None, None, None, None))  # type: ignore[arg-type]
    phase._seconds_left = lambda: 600.0  # type: ignore[method-assign]
    assert phase._used_share(2) == pytest.approx(0.4)
    assert phase._used_share(7) == pytest.approx(0.7)
    assert phase._used_share(12) == 1
