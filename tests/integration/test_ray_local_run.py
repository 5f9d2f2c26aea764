"""A Ray of this machine that a run starts: nothing of it outlives the run, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart_core.config_load import dump_yaml
from rollart_core.runtime import ray_local

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]
WITHIN_S = 200.0
CONFIG = {
    "name": "local",
    "runtime": {"kind": "ray", "num_env_workers": 2},
    "model": {
        **{"kind": "new", "num_layers": 1, "width": 32, "num_heads": 2, "num_kv_heads": 1},
        **{"head_dim": 16, "ffn_width": 64, "vocab_size": 320},
    },
    "env": "toy/FrozenLake-v1",
    "rollout": {"groups_per_batch": 2, "group_size": 4, "max_turns": 4, "max_new_tokens": 4},
    "evaluation": {"tasks": 8, "greedy": False},
    "trackers": [],
    "stop": {"batches": 100_000},
}


def _until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False


def _folders(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"rollart-ray-{pid}-*"))


def _processes(token: bytes, besides: int) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = token in (process / "environ").read_bytes() and int(process.name) != besides
            found += [(process / "cmdline").read_bytes().decode(errors="replace")] if mine else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_it_is_left(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "local.yaml"
    config.write_text(dump_yaml({**CONFIG, "runs_dir": str(tmp_path / "runs")}))
    said = tmp_path / "said"
    main = "from rollart_core.cli import main; main()"
    command = [sys.executable, "-c", main, "run", str(config), "--json"]
    with said.open("wb") as out:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out)
    try:
        assert _until(lambda: b"train: grpo" in said.read_bytes() or run.poll() is not None)
        assert run.poll() is None, said.read_text()
        (folder,) = _folders(run.pid)
        token = f"RAY_AUTH_TOKEN_PATH={folder}/token".encode()
        assert _processes(token, run.pid)
        run.send_signal(number)
        code = run.wait(WITHIN_S)
        assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
        assert _until(lambda: not _processes(token, run.pid)), _processes(token, run.pid)
        if number is signal.SIGKILL:
            ray_local.remove_orphans(Path("/tmp"))  # as the next run does
        assert not _folders(run.pid)
    finally:
        run.kill()
        run.communicate()
    assert os.environ.get("RAY_AUTH_TOKEN_PATH") is None
