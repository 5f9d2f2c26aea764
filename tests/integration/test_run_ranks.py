"""Whole runs whose trainer is several ranks."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_run import left_behind, run

from rollart_core.engine.audit import audit
from rollart_core.engine.journal_reader import JournalReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each rank imports torch anew


def rank_pids() -> list[int]:
    """The processes that log to a trainer's file, in the order of their ranks."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                log = Path(os.readlink(entry / "fd" / "1")).name
                if log.startswith("trainer"):
                    found[log] = int(entry.name)
        except OSError:
            continue
    return [pid for _, pid in sorted(found.items())]


def test_a_run_with_two_trainer_ranks_gets_over_the_death_of_one(tmp_path):
    """The rank is killed once the second checkpoint stands, wherever the run is then."""
    killed: list[int] = []

    def kill() -> None:
        while not list(tmp_path.glob("runs/*/checkpoints/v000002/run_state.json")):
            time.sleep(0.02)
        killed.extend(rank_pids())
        os.kill(killed[1], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    report = run(
        tmp_path,
        runtime={"num_trainer_ranks": 2},
        checkpoint={"every_batches": 1},
        stop={"batches": 6},
    )
    killer.join()
    assert report.ok
    assert report.batches == 6
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    with JournalReader(Path(report.run_dir)) as journal:
        assert {m.value >= 1.0 for m in journal.metrics("train/rank_imbalance")} == {True}
    assert len(killed) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in killed)
    assert not rank_pids()
    assert not left_behind()
    assert (Path(report.run_dir) / "model-trained" / "model.safetensors").is_file()
