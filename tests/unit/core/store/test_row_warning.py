"""Rows per trajectory: the metric, and the warning of a run."""

from pathlib import Path

import numpy as np
import pytest

from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.store.metrics import rollout_metrics
from rollart_core.store.recorder import RunRecorder
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory

TASK = Task("toy/FrozenLake-v1", "train", 0, 0)


class Told(NobodyWatches):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def trajectory(index: int, num_rows: int) -> Trajectory:
    row = np.zeros(1, np.int32)
    sample = Sample(row, row == 0, np.zeros(1, np.float32), row, row)
    ticket = Ticket(f"g.{index}", TASK, "g", index)
    return Trajectory(ticket, "finished", (sample,) * num_rows, reward=0.0)


def test_the_metric_is_the_mean_over_trajectories() -> None:
    group = Group("g", TASK, (trajectory(0, 1), trajectory(1, 4)), 2)
    assert rollout_metrics([group], 0)["rollout/rows_per_trajectory"] == 2.5


@pytest.mark.parametrize(
    ("keep", "note", "said"),
    [
        (None, "because", ["Warning: 2.5 token rows per trajectory: because"]),
        (
            *(True, None),
            [
                "Warning: 2.5 token rows per trajectory: the history of some conversations was "
                "rewritten"
            ],
        ),
        (False, "because", []),
    ],
)
def test_several_rows_are_reported_once(
    tmp_path: Path, keep: bool | None, note: str | None, said: list[str]
) -> None:
    given = {"env": "frozenlake", "model": {"kind": "new"}, "stop": {"batches": 1}}
    config, _ = validate({**given, "rollout": {"keep_thinking": keep}})
    assert config is not None
    told = Told()
    recorder = RunRecorder(resolve_run(config), tmp_path, told)
    recorder.row_note = note
    for rows in (1.0, 2.5, 3.0):
        recorder._warn_of_rows(rows)
    assert told.messages == said
