"""The guard over Ray: a run with a fault goes back, and goes on, as it does on one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pace import scaled
from support.patient_ray import patient_ray
from support.ray_runs import PLACEMENT_S
from support.whole_runs import run

from rollart_bench.stability import NotFinite
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
AUDIT = Path(__file__).parents[4] / "scripts" / "audit_journal.py"


class NotFiniteOnce(NotFinite):
    """Gradients that are no numbers in the sixth batch."""

    faulty = (5,)


@pytest.mark.parametrize("mode", [{"mode": "sync", "max_staleness": None}, {"max_staleness": 0}])
def test_a_fault_is_undone_on_ray(tmp_path: Path, mode: dict[str, Any]) -> None:
    """``updates_per_batch: 3`` makes three updates in a row that are not finite: it diverged."""
    with patient_ray():
        report = run(
            tmp_path,
            **mode,
            runtime={"kind": "ray", "placement_s": PLACEMENT_S},
            algorithm=f"{__name__}:{NotFiniteOnce.__name__}",
            trainer={"updates_per_batch": 3, "warmup_train_steps": 0},
            rollout={"groups_per_batch": 3},
            guard={"window": 2},
            checkpoint={"every_batches": 2},
            failures={"hang_s": scaled(300)},
            stop={"batches": 8},
        )
    assert report.ok
    assert report.guard is not None
    (trip,) = report.guard["trips"]
    assert (trip["rule"], trip["policy_version"], trip["back_to"]) == ("diverged", 5, 2)
    assert (trip["as_version"], trip["lr_factor"]) == (6, 0.5)
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    assert checked.discarded_by_guard == 4 * 3 * 4
    assert checked.open == 0
    assert report.batches == 8 - 4
    with JournalReader(Path(report.run_dir)) as journal:
        rates = {
            row.policy_version: row.value for row in journal.metrics("train/lr", rolled_back=True)
        }
        versions = [batch.batch for batch in journal.batches() if batch.state == "trained"]
    assert versions == [0, 1, 6, 7]
    assert [rates[v] for v in (1, 4, 6, 7)] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
    subprocess.run([sys.executable, AUDIT, report.run_dir], check=True, stdout=subprocess.DEVNULL)
