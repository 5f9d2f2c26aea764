"""Several trackers of one run, one of which fails."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import whole_runs

from rollart_core.contracts.tracker import Tracker
from rollart_plugins.trackers.jsonl import JsonlTracker


class Failing(Tracker):
    """Fails at its second metrics."""

    num_logged = 0

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None: ...

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        self.num_logged += 1
        if self.num_logged > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise AssertionError("it is disabled")


def test_a_run_has_any_number_of_trackers_and_outlives_one_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    trackers = ["jsonl", f"{__name__}:Failing", "tensorboard"]
    report = whole_runs.run(tmp_path, trackers=trackers)
    folder = Path(report.run_dir)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == [1, 2, 3]
    assert all("train/loss" in row for row in rows)
    (events,) = (folder / "tensorboard").glob("events.*")
    assert events.read_bytes().count(b"\ntrain/loss\x15") == 3


def test_json_lines_go_on_after_a_resume_and_hold_null_for_no_number(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker()
        with pytest.raises(RuntimeError, match="start"):
            tracker.log({}, train_step=0, policy_version=0)
        tracker.start(tmp_path, {})
        tracker.log({"a": math.inf, "b": 0.5}, train_step=step, policy_version=step - 1)
        tracker.close()
        tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"train_step": step, "policy_version": step - 1, "a": None, "b": 0.5} for step in (1, 2)
    ]
