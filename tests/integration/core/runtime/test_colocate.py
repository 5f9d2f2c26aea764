"""Trainer and engine that use one device in turns: the order of calls, losses, deaths, phases."""

from __future__ import annotations

import pytest
from support.device_order import DeviceOrder
from support.whole_runs import losses, run, tokens

SYNC = {"mode": "sync", "max_staleness": None, "deterministic": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_colocated_run_has_the_losses_and_tokens_of_the_same_run_without(tmp_path, ranks):
    each = {"num_engines": ranks, "num_trainer_ranks": ranks}
    plain = run(tmp_path / "plain", **SYNC, runtime=each)
    turns = run(tmp_path / "turns", **SYNC, runtime={**each, "colocate": True})
    assert len(losses(plain)) == 3
    assert losses(turns) == losses(plain)
    assert tokens(turns) == tokens(plain)


def test_engine_and_trainer_change_sides_once_per_batch_and_phases_wake_the_engine(
    tmp_path, monkeypatch
):
    order = DeviceOrder(monkeypatch)
    validated = {"evaluation": {"every_batches": 1, "validation_tasks": 4}}
    run(tmp_path, **SYNC, **validated, runtime={"colocate": True})
    assert order.wrong == []
    assert order.num_batches() == 3
    assert order.calls.count("sleep") == order.calls.count("reload")
    assert order.calls[-4:] == ["generate", "sleep", "reload", "export_hf"]
