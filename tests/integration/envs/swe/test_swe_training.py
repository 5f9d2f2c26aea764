"""A policy trained on code in boxes, while boxes are killed under it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from support.sandbox_types import HELD, IN_DOCKER, missing
from support.whole_runs import num_trained, start, wait_for_batches

from rollart_core.rollout import loop
from rollart_core.store.audit import audit
from rollart_sandboxes.pool.live import LiveSandboxes, live_sandboxes

NUM_KILLED = 3
CONFIG = {
    "name": "repair",
    "seed": 1,
    "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 384},
    "trackers": [],
    "rollout": {
        "groups_per_batch": 2,
        "group_size": 4,
        "max_concurrent": 4,
        "max_turns": 2,
        "max_new_tokens": 32,
        "max_context_tokens": 1536,
    },
    "evaluation": {"tasks": 2, "greedy": False},
    "stop": {"batches": 100_000},
}


def kill_a_sandbox(dead: set[str]) -> None:
    """Kill all processes of one more box, if one is there.

    Raises:
        pytest.skip.Exception: If boxes have no cgroup of their own here.
    """
    for record in loop.run(live_sandboxes(LiveSandboxes())):
        if record.name in dead or record.ready_at is None:
            continue
        folders = (*record.left.get("cgroup", ()), *record.left.get("usage", ()))
        if not folders:
            pytest.skip("boxes have no cgroup of their own here: nothing can be killed")
        for folder in folders:
            with contextlib.suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                    dead.add(record.name)
        if record.name in dead:
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("isolation", HELD)
def test_a_run_goes_on_when_its_sandboxes_die(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to end once boxes were killed, one of them in an episode, and it went on."""
    if why := missing(isolation):
        pytest.skip(why)
    monkeypatch.setenv("ROLLART_BOXES_DIR", str(tmp_path / "boxes"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    sandbox = {"id": isolation, **(IN_DOCKER if isolation == "docker" else {})}
    env = {"id": "support.busy_repair:GuessingRepairEnv", "sandbox": sandbox, "num_attempts": 2}
    config = {**CONFIG, "env": env, "runs_dir": str(tmp_path / "runs")}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    run = start(path)
    try:
        run_dir = wait_for_batches(tmp_path / "runs", 1, run)
        dead: set[str] = set()
        while len(dead) < NUM_KILLED or not audit(run_dir).failures.get("sandbox"):
            assert run.poll() is None, run.communicate()
            kill_a_sandbox(dead)
            time.sleep(0.05)
        wait_for_batches(tmp_path / "runs", num_trained(run_dir) + 1, run)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode == 130, err
    report = json.loads(out)
    assert report["batches"] >= 2
    assert report["failures"].get("sandbox", 0) >= 1, report["failures"]
    assert loop.run(live_sandboxes(LiveSandboxes())) == []
