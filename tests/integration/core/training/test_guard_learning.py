"""A run with a fault that the guard undoes; `rollart bench stability` has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.whole_runs import run

from rollart_bench.stability import NotFinite
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader


class NotFiniteTwice(NotFinite):
    """Gradients that are no numbers, in the sixth batch and in the ninth."""

    faulty = (5, 8)


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
