"""A live run that is scaled by hand and by policy, and whose parts hang or die for good."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import Program
from support.run_parts import part_pids
from support.whole_runs import num_trained, start, wait_for_batches, write
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_core.config.load import load_config
from rollart_core.errors import ConfigError, UserError
from rollart_core.runtime.control import Control, ask
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader

ENDLESS: dict[str, Any] = {
    "reward": None,
    "stop": {"batches": 100_000},
    "env": {"delay_s": 0.01},
    "evaluation": {"tasks": 1, "greedy": False},
}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Program]]:
    """Start runs that are over with the test, however that ends."""
    started: list[Program] = []

    def start_run(changes: dict[str, Any]) -> Program:
        started.append(start(write(tmp_path, changes)))
        return started[-1]

    yield start_run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    with JournalReader(run_dir) as journal:
        return [json.loads(e.payload) for e in journal.events() if e.kind == kind]


def metric(run_dir: Path, name: str) -> list[float]:
    with JournalReader(run_dir) as journal:
        return [m.value for m in journal.metrics(name)]


def wait_until(true: Callable[[], bool], process: Program) -> None:
    """Look again and again until something holds; the test's timeout bounds it."""
    while not true():
        if process.poll() is not None:
            raise AssertionError(process.communicate())
        time.sleep(0.05)


def further_batches(run_dir: Path, n: int, process: Program) -> None:
    wait_for_batches(run_dir.parent, num_trained(run_dir) + n, process)


def stop(process: Program, run_dir: Path) -> None:
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert not part_pids(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_scaled_up_and_down_while_it_trains(tmp_path, live):
    process = live(ENDLESS)
    run_dir = wait_for_batches(tmp_path / "runs", 1, process)
    assert stat.S_IMODE((run_dir / "control.sock").stat().st_mode) == 0o600
    up = ask(run_dir, {"scale": {"engines": 2, "env_workers": 2}}, timeout_s=60)
    assert up["before"] == {"engines": 1, "env_workers": 1}
    assert up["after"] == {"engines": 2, "env_workers": 2}
    further_batches(run_dir, 3, process)
    parts = part_pids(run_dir)
    assert (len(parts["engine"]), len(parts["engine-1"]), len(parts["env"])) == (1, 1, 2)
    with pytest.raises(UserError, match="a run needs at least one"):
        ask(run_dir, {"scale": {"engines": 0}}, timeout_s=60)
    with pytest.raises(UserError, match=r"gpus: no such thing to scale; .* engines \(2\)"):
        ask(run_dir, {"scale": {"gpus": 2}}, timeout_s=60)
    with pytest.raises(UserError, match="at most 256"):
        ask(run_dir, {"scale": {"engines": 1000}}, timeout_s=60)
    shown = CliRunner().invoke(build_app(), ["scale", str(run_dir), "engines=1", "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["after"]["engines"] == 1
    further_batches(run_dir, 2, process)
    assert "engine-1" not in part_pids(run_dir)
    stop(process, run_dir)
    assert set(metric(run_dir, "engines/num")) >= {1.0, 2.0}
    assert [(e["target"], e["after"]) for e in events(run_dir, "scaled")] == [
        ("engines", 2),
        ("env_workers", 2),
        ("engines", 1),
    ]
    with pytest.raises(UserError, match="is not running: it has ended"):
        ask(run_dir, {}, timeout_s=5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_that_hang_are_replaced(tmp_path, live):
    # What hangs is stopped. Any other that has no processor for that long is replaced as well.
    failures = {"heartbeat_s": 0.3, "hang_s": 6.0, "max_rate": 0.9}
    changes = {**ENDLESS, "failures": failures, "runtime": {"num_engines": 2}}
    process = live(changes)
    run_dir = wait_for_batches(tmp_path / "runs", 1, process)
    parts = part_pids(run_dir)
    hanging = ("engine-1", "env", "trainer")
    for name in hanging:
        os.kill(parts[name][0], signal.SIGSTOP)

    def back() -> list[dict[str, Any]]:
        return [e for e in events(run_dir, "part_back") if e["part"] == "engine-1"]

    wait_until(lambda: bool(back() and events(run_dir, "trainer_lost")), process)
    further_batches(run_dir, 2, process)
    hung = {e["part"] for e in events(run_dir, "part_hung")}
    assert hung >= set(hanging)
    replaced = part_pids(run_dir)
    assert all((replaced[name] != parts[name]) == (name in hung) for name in parts)
    assert all(e["policy_version"] is not None for e in back())
    stop(process, run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_any_engine_the_run_ends_and_says_why(tmp_path, live):
    changes = {**ENDLESS, "failures": {"max_restarts": 0}, "checkpoint": {"every_batches": 1}}
    process = live(changes)
    run_dir = wait_for_batches(tmp_path / "runs", 2, process)
    os.kill(part_pids(run_dir)["engine"][0], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "no inference engine is left and none will restart" in err
    assert "SIGKILL" in err
    assert not part_pids(run_dir)
    assert (run_dir / "checkpoints").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_join_by_policy_when_requests_queue(tmp_path, live):
    engines = {"max": 2, "waiting_above": 1}
    scaling = {"engines": engines, "look_s": 0.1, "hold_s": 0.1, "cool_s": 600}
    changes = {**ENDLESS, "scaling": scaling, "engine": {"max_sessions": 2}}
    process = live(changes)
    run_dir = wait_for_batches(tmp_path / "runs", 1, process)
    wait_until(lambda: bool(events(run_dir, "scaled")), process)
    (change,) = events(run_dir, "scaled")
    assert (change["target"], change["after"], change["why"]) == ("engines", 2, "high load")
    further_batches(run_dir, 1, process)
    stop(process, run_dir)


def test_runs_that_do_not_live_cannot_be_scaled(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        ask(tmp_path, {}, timeout_s=1)
    (tmp_path / "journal.db").touch()
    with pytest.raises(UserError, match="it has ended"):
        ask(tmp_path, {}, timeout_s=1)
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control.sock"))
    with pytest.raises(UserError, match="it was killed"):
        ask(tmp_path, {}, timeout_s=1)
    answer = CliRunner().invoke(build_app(), ["scale", str(tmp_path), "engines=two"])
    assert isinstance(answer.exception, UserError)
    assert "give a target and its number" in str(answer.exception)


def test_a_control_socket_answers_in_a_folder_of_any_depth(tmp_path):
    import asyncio

    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (deep / "journal.db").touch()

    async def echo(request):
        if request.get("wrong"):
            raise ConfigError("that is wrong\nin two lines")
        return {"got": request}

    async def main() -> None:
        control = Control(deep, echo)
        await control.open()
        answer = await asyncio.to_thread(ask, deep, {"a": 1}, timeout_s=5)
        assert answer == {"got": {"a": 1}}
        with pytest.raises(UserError, match="that is wrong"):
            await asyncio.to_thread(ask, deep, {"wrong": 1}, timeout_s=5)
        await control.close()
        assert not (deep / "control.sock").exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scaling": {}}, "scaling needs engines or env_workers"),
        ({"scaling": {"engines": {"max": 4, "min": 2}}}, "num_engines: 1, which is not between 2"),
        ({"scaling": {"engines": {"max": 1, "min": 2}}}, "min .2. must be at most max .1."),
        ({"scaling": {"engines": {"max": 2, "kv_below": 0.9}}}, "kv_below .* must be below"),
        (
            {"scaling": {"env_workers": {"max": 2}}, "runtime": {"env_processes": 0}},
            "no effect with runtime.env_processes: 0",
        ),
        ({"failures": {"hang_s": None, "heartbeat_s": 5}}, "no effect with failures.hang_s"),
    ],
)
def test_scaling_that_cannot_be_is_refused(tmp_path, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        load_config(write(tmp_path, changes))
