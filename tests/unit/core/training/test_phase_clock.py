"""The seconds of the phases of an update."""

from __future__ import annotations

import pytest
import torch

from rollart_core.store.metrics import step_seconds
from rollart_core.training.phase_clock import PhaseClock


def test_phases_that_repeat_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 16.5, 17.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("batch", "forward", "backward", "forward", "optimizer"):
        clock.end(phase)
    assert clock.seconds() == {
        "batch_s": 1.0,
        "forward_s": 2.5,
        "backward_s": 3.5,
        "optimizer_s": 4.0,
    }


def test_what_no_phase_explains_is_other() -> None:
    updates = [{"batch_s": 1.0, "forward_s": 2.0, "loss": 9.0}, {"forward_s": 3.0}]
    assert step_seconds(updates, waited_s=10.0, train_s=8.0, publish_s=0.5) == {
        "wait": 10.0,
        "batch": 1.0,
        "forward": 5.0,
        "backward": 0.0,
        "optimizer": 0.0,
        "publish": 0.5,
        "other": 1.5,
    }
