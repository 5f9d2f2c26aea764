"""Runs into which faults are injected: the guard undoes them, and the run ends above its start."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from test_run import run

from rollart_algorithms.grpo import GRPO
from rollart_core.bench import bandit
from rollart_core.contracts.algorithm import LossBatch, Signals
from rollart_core.engine.audit import audit
from rollart_core.engine.journal_reader import JournalReader
from rollart_core.types import FloatArray, Group

FIRST = 40
"""The batch, from 0, at which a fault of a learning run begins."""


class Faulty(GRPO):
    """GRPO with a fault in some batches, counted from the start of the trainer."""

    faulty: Container[int] = range(FIRST, FIRST + 1)
    batches = -1

    @property
    def is_faulty(self) -> bool:
        return self.batches in self.faulty

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        self.batches += 1
        return super().advantages(groups, signals)


class NotFinite(Faulty):
    """Gradients that are no numbers."""

    def loss(self, trainer_logprobs: Any, batch: LossBatch) -> Any:
        loss, metrics = super().loss(trainer_logprobs, batch)
        return (loss * math.nan if self.is_faulty else loss), metrics


class NotFiniteTwice(NotFinite):
    """The same, in two other batches."""

    faulty = (5, 8)


class InvertedRewards(Faulty):
    """What was good is punished, for ten updates: without a guard success falls to 0.06."""

    faulty = range(FIRST, FIRST + 10)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        rows = super().advantages(groups, signals)
        return [-row for row in rows] if self.is_faulty else rows


class TenfoldRate(Faulty):
    """The learning rate is ten times what it should be, for five updates."""

    faulty = range(20, 25)

    def loss(self, trainer_logprobs: Any, batch: LossBatch) -> Any:
        from rollart_core.train.optimizer import GuardedAdamW

        original = getattr(GuardedAdamW, "original", GuardedAdamW.update)
        factor = 10.0 if self.is_faulty else 1.0

        def update(optimizer: Any, loss: float, lr: float | None = None, **more: Any) -> Any:
            before = optimizer.lr_factor
            optimizer.lr_factor = before * factor
            try:
                return original(optimizer, loss, lr, **more)
            finally:
                optimizer.lr_factor = before

        GuardedAdamW.original = original  # type: ignore[attr-defined]
        GuardedAdamW.update = update  # type: ignore[method-assign]
        return super().loss(trainer_logprobs, batch)


@pytest.mark.slow
def test_batches_without_finite_gradients_are_undone_in_a_real_run(tmp_path: Path) -> None:
    """Once; the second time the run ends, with good weights."""
    report = run(
        tmp_path,
        algorithm=f"{__name__}:{NotFiniteTwice.__name__}",
        rollout={"groups_per_batch": 3},
        trainer={"updates_per_batch": 3, "warmup_train_steps": 0},
        guard={"window": 2, "max_rollbacks": 1},
        checkpoint={"every_batches": 2},
        stop={"batches": 99},
    )
    assert not report.ok
    assert "guard.max_rollbacks (1) are used up" in report.stop_reason
    assert report.guard is not None
    first, second = report.guard["trips"]
    assert (first["rule"], first["policy_version"], first["back_to"]) == ("diverged", 5, 2)
    assert (first["as_version"], first["lr_factor"]) == (6, 0.5)
    assert (second["policy_version"], second["back_to"], second["as_version"]) == (8, 6, 9)
    assert (report.guard["rollbacks"], report.guard["lr_factor"]) == (1, 0.5)
    assert report.after is not None
    assert (Path(report.run_dir) / "model-trained" / "config.json").is_file()
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert checked.ended == report.stop_reason
    assert checked.discarded_by_guard == (4 + 3) * 3 * 4
    assert report.batches == 2
    with JournalReader(Path(report.run_dir)) as journal:
        rates = {
            row.policy_version: row.value for row in journal.metrics("train/lr", rolled_back=True)
        }
    assert [rates[v] for v in (1, 4, 6, 7)] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [NotFinite, InvertedRewards, TenfoldRate])
def test_a_run_ends_above_its_start_whatever_is_injected(
    tmp_path: Path, fault: type[Faulty]
) -> None:
    config = bandit.merged(
        bandit.run_config("guard", tmp_path, {"arms": 2, "turns": 2}),
        {
            **bandit.short_run(),
            "algorithm": {"id": f"{__name__}:{fault.__name__}"},
            "guard": "on",
            "checkpoint": {"every_batches": 4},
            "evaluation": {"split": "test", "tasks": 128, "greedy": False},
            "stop": {"batches": 100},
        },
    )
    learned = bandit.learn(config)
    report = learned.report
    assert report.ok, report.stop_reason
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert learned.after > learned.before + 0.2
    assert fmean(learned.success[-8:]) > fmean(learned.success[:8]) + 0.2
    assert report.guard is not None
    if fault is InvertedRewards:  # the others do no harm to this small task
        assert [trip["rule"] for trip in report.guard["trips"]] == ["drop"]
        assert min(learned.success[FIRST:]) > 0.8
