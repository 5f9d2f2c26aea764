"""Trainer and engine that use one device in turns: the order of calls, losses, deaths, phases."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.device_order import DeviceOrder
from support.pace import until
from support.whole_runs import losses, run, tokens, write

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.runtime.process import WorkerProcess
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader

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


def test_a_gpu_without_room_is_refused_before_anything_starts(tmp_path, monkeypatch):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 1\necho 80000\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    started: list[str] = []
    monkeypatch.setattr(WorkerProcess, "start", lambda worker, *_: started.append(worker.name))
    large = {"model": {"num_layers": 4, "width": 128}, "runtime": {"colocate": True}}
    with pytest.raises(ConfigError) as e:
        run(tmp_path, **SYNC, **large)
    assert re.search(
        r"a GPU needs 0\.0\d+ GB in training .* over 1 rank.* and 0\.0\d+ GB in generation "
        r".* one row of 128 tokens\), but has 0\.00105 GB: add lora",
        str(e.value),
    )
    assert started == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "async"}, "nothing is generated during training.*set mode: sync"),
        ({"runtime": {"colocate": True, "num_engines": 2}}, "engines use 2 device.*has 1 rank"),
        ({"weights": "collective"}, "sends weights while trainer and engines both run.*disk"),
        (
            {"engine": "rollart_testing.engine:ScriptedEngine"},
            "cannot free the memory of its device",
        ),
        ({"scaling": {"engines": {"max": 2}}}, "no device for scaling.engines"),
        (
            {"engine": {"id": "vllm", "command": ["true"], "first_gpu": 1}},
            "first_gpu: has no effect with runtime.colocate",
        ),
    ],
)
def test_what_needs_both_sides_at_once_is_refused(tmp_path, changes, message):
    sync = {"mode": "sync", "max_staleness": None, "runtime": {"colocate": True}}
    with pytest.raises(ConfigError, match=message):
        resolve_run(load_config(write(tmp_path, {**sync, **changes})))


def test_an_engine_that_dies_asleep_restarts_when_the_engines_have_the_device(
    tmp_path, monkeypatch
):
    plain = run(tmp_path / "plain", **SYNC)
    order = DeviceOrder(monkeypatch)
    call, killed = WorkerProcess.call, []

    async def killing(worker: WorkerProcess, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "train_batch" and not killed:
            killed.append(len(order.calls))
            engine = next(w for w in order.workers if w.name == "engine")
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: not engine.alive, "its death")
        return await call(worker, method, *args, **kwargs)

    monkeypatch.setattr(WorkerProcess, "call", killing)
    turns = run(tmp_path / "turns", **SYNC, runtime={"colocate": True})
    assert killed
    assert losses(turns) == losses(plain)
    assert order.wrong == []
    with JournalReader(Path(turns.run_dir)) as journal:
        kinds = [e.kind for e in journal.events() if e.kind in ("part_died", "part_back")]
    assert kinds == ["part_died", "part_back"]
    assert audit(Path(turns.run_dir)).ok


@pytest.mark.parametrize("phase", ["generate", "train_batch"])
def test_a_trainer_that_dies_in_either_phase_is_restarted_with_the_device(
    tmp_path, monkeypatch, phase
):
    order = DeviceOrder(monkeypatch)
    call, seen = WorkerProcess.call, []

    async def killing(worker: WorkerProcess, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == phase and "train_batch" in order.calls:
            seen.append(method)
            if len(seen) == 1:
                trainer = next(w for w in order.workers if w.name == "trainer")
                os.kill(trainer.pid, signal.SIGKILL)
        return await call(worker, method, *args, **kwargs)

    monkeypatch.setattr(WorkerProcess, "call", killing)
    turns = run(tmp_path, **SYNC, runtime={"colocate": True})
    assert seen
    assert order.wrong == []
    assert turns.batches == 3
    assert audit(Path(turns.run_dir)).ok


@pytest.mark.parametrize("phase", ["generate", "train_batch"])
def test_a_run_that_is_preempted_in_either_phase_resumes_to_the_same_losses(
    tmp_path, monkeypatch, phase
):
    plain = run(tmp_path / "plain", **SYNC)
    order = DeviceOrder(monkeypatch)
    call, sent = WorkerProcess.call, []

    async def preempting(worker: WorkerProcess, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == phase and "train_batch" in order.calls and not sent:
            sent.append(method)
            os.kill(os.getpid(), signal.SIGTERM)
        return await call(worker, method, *args, **kwargs)

    monkeypatch.setattr(WorkerProcess, "call", preempting)
    colocated = {**SYNC, "runtime": {"colocate": True}}
    stopped = run(tmp_path / "turns", **colocated)
    assert sent
    assert stopped.batches < 3
    resumed = run(tmp_path / "turns", resume=Path(stopped.run_dir), **colocated)
    assert order.wrong == []
    assert losses(resumed) == losses(plain)
    assert audit(Path(resumed.run_dir)).ok
