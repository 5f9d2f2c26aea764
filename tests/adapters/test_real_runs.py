"""Training runs on foreign environments, unmodified: their packages in the adapters' own Python.

Needs torch here, and the packages in ``.venv-adapters`` (or ``ROLLART_ADAPTERS_PYTHON``).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters.openenv_process import ServerProcess
from support.pace import scaled

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import read_trajectories

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(900)]
pytest.importorskip("torch", reason="torch is not installed here: .venv runs this")

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
        "reward_spec": {"ground_truth": str(2 * i)},
        "reward_model": {"ground_truth": str(2 * i)},
    }
    for i in range(8)
]
TASKS = {"tasks": {"train": ROWS, "test": ROWS[:4]}}
CASES: dict[str, list[dict[str, Any]]] = {
    "gymnasium": [
        {"id": "CliffWalking-v1", "reward": "relative"},
        {"id": "FrozenLake-v1", "make": {"is_slippery": False}},
    ],
    "reasoning-gym": [{"id": "leg_counting"}, {"id": "basic_arithmetic", "extract": "text"}],
    "gem": [
        {"id": "game:GuessTheNumber-v0-easy"},
        {"id": "rg:leg_counting", "prompt": "{observation} Put your answer into \\boxed{}."},
    ],
    "skyrl-gym": [{"id": "gsm8k", **TASKS}, {"id": "aime", **TASKS}],
    "textarena": [{"id": "GuessTheNumber-v0"}, {"id": "FrozenLake-v0-random"}],
}
"""Adapter -> environments that are trained in one run."""


@pytest.fixture(scope="module")
def python() -> str:
    """The adapters' interpreter."""
    beside = Path(__file__).resolve().parents[2] / ".venv-adapters" / "bin" / "python"
    found = os.environ.get("ROLLART_ADAPTERS_PYTHON", str(beside))
    if not Path(found).exists():
        pytest.skip(f"{found} is missing: `make adapters` makes it")
    return found


def config(folder: Path, env: dict[str, Any] | list[dict[str, Any]]) -> Path:
    path = folder / "run.yaml"
    content = {
        "name": "adapters",
        "runs_dir": str(folder / "runs"),
        "seed": 1,
        "mode": "async",
        "max_staleness": 1,
        "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
        "env": env,
        "trackers": [],
        "rollout": {
            "groups_per_batch": 2,
            "group_size": 4,
            "max_concurrent": 16,
            "max_turns": 2,
            "max_new_tokens": 4,
            "max_context_tokens": 2048,
        },
        "evaluation": {"tasks": 4, "greedy": False},
        # Foreign packages are imported over the first reset.
        "deadlines": {
            **{"reset_s": scaled(200), "step_s": scaled(100), "reward_s": scaled(100)},
            **{"episode_s": scaled(400), "ticket_s": scaled(800)},
        },
        "failures": {"hang_s": scaled(200)},
        "stop": {"batches": 2},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def trains(folder: Path, env: dict[str, Any] | list[dict[str, Any]]) -> Path:
    report = launch(resolve_run(load_config(config(folder, env))))
    assert report.batches >= 2
    assert report.failures == {}
    assert audit(Path(report.run_dir)).ok
    return Path(report.run_dir)


@pytest.mark.parametrize("adapter", CASES)
def test_foreign_environments_train(tmp_path: Path, python: str, adapter: str) -> None:
    envs = [{"adapter": adapter, "python": python, **env} for env in CASES[adapter]]
    run_dir = trains(tmp_path, envs)
    trained = {t.ticket.task.env_id for t in read_trajectories(run_dir) if t.num_loss_tokens}
    assert trained == {f"{adapter}::{env['id']}" for env in CASES[adapter]}


@pytest.mark.parametrize("name", ["echo", "guess"])
def test_an_openenv_server_trains(tmp_path: Path, python: str, name: str) -> None:
    server = ServerProcess(python, name)
    try:
        trains(
            tmp_path,
            {"adapter": "openenv", "id": name, "base_url": server.url, "connect_s": 60.0},
        )
    finally:
        server.close()


def test_a_server_that_is_down_stops_a_run_before_it_starts(tmp_path: Path) -> None:
    path = config(tmp_path, {"adapter": "openenv", "id": "echo", "base_url": "http://127.0.0.1:9"})
    with pytest.raises(ValueError, match="no OpenEnv server is reachable"):
        resolve_run(load_config(path))
    assert not (tmp_path / "runs").exists()


CHECKED = [
    pytest.param("gem::rg:leg_counting", marks=pytest.mark.nightly),
    "skyrl-gym::aime",
    "textarena::TowerOfHanoi-v0",
]


@pytest.mark.parametrize("env_id", CHECKED)
def test_rollart_check_in_the_other_python(python: str, env_id: str) -> None:
    options = [f"python={python}"]
    options += [f"tasks={json.dumps(TASKS['tasks'])}"] if env_id.startswith("skyrl") else []
    command = ["-c", "from rollart_core.cli import main; main()", "check", env_id, *options]
    limit = ["--timeout", f"{scaled(850):g}"]
    done = subprocess.run(
        [python, *command, *limit, "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    assert [r for r in report["results"] if r["outcome"] == "FAIL"] == []
    assert report["counts"]["PASS"] > 15
