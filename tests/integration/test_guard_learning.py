"""Runs into which faults are injected: the guard undoes them, and the run ends above its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from rollart_core.runtime.report import RunReport
from rollart_core.types import FloatArray, Group

FIRST = 40
"""The batch, from 0, at which a fault of a learning run begins."""


class Faulty(GRPO):
    """GRPO with a fault in some batches, counted from the start of the trainer."""

    faulty: range = range(FIRST, FIRST + 1)
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


class NotFiniteSoon(NotFinite):
    """The same, in the sixth batch."""

    faulty = range(5, 6)


class InvertedRewards(Faulty):
    """What was good is punished."""

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


def metrics(report: RunReport, name: str) -> list[float]:
    with JournalReader(Path(report.run_dir)) as journal:
        return [row.value for row in journal.metrics(name) if row.value is not None]


@pytest.mark.slow
def test_a_batch_without_finite_gradients_is_undone_in_a_real_run(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        algorithm=f"{__name__}:{NotFiniteSoon.__name__}",
        rollout={"groups_per_batch": 3},
        trainer={"updates_per_batch": 3, "warmup_train_steps": 0},
        guard={"window": 2},
        checkpoint={"every_batches": 2},
        stop={"batches": 9},
    )
    assert report.ok
    assert report.guard is not None
    (trip,) = report.guard["trips"]
    assert (trip["rule"], trip["policy_version"], trip["back_to"]) == ("diverged", 5, 2)
    assert (trip["as_version"], report.guard["lr_factor"]) == (6, 0.5)
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert checked.discarded_by_guard == 4 * 3 * 4
    rates = metrics(report, "train/lr")
    assert rates == [pytest.approx(1e-3)] * 6 + [pytest.approx(5e-4)] * 9


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
    print(fault.__name__, learned.before, learned.after, report.guard, checked.discarded_by_guard)
    assert learned.after > learned.before + 0.2
    assert fmean(learned.success[-8:]) > fmean(learned.success[:8]) + 0.2
