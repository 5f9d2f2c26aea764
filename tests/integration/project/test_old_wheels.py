"""Plugin wheels of an earlier release, for versions 1 and 2 of the plugin API.

They import modules of RollArt by names that have moved since; `old_wheels/README.md` says how they
were built. They are unpacked into a folder of the module path, as pip unpacks them.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fork_server import start_program

from rollart_core import OLDEST_PLUGIN_API, PLUGIN_API

pytestmark = pytest.mark.slow

WHEELS = sorted(Path(__file__).with_name("old_wheels").glob("*.whl"))
VERSIONS = {
    **{f"acme/{name}-v1": 1 for name in ("Echo", "Mean", "Threads")},
    **{f"acme/{name}-v1": 2 for name in ("Step", "StepReward", "Agent")},
    **{f"acme/{name}-v1": 2 for name in ("Reward", "Algorithm", "Mapper")},
}
"""What the wheels bring, and the plugin API that it was written for."""
RUN: dict[str, Any] = {
    "name": "old",
    "model": {
        **{"kind": "new", "num_layers": 1, "width": 16, "num_heads": 1, "num_kv_heads": 1},
        **{"head_dim": 16, "ffn_width": 16, "vocab_size": 300},
    },
    "trackers": [],
    "rollout": {
        **{"groups_per_batch": 1, "group_size": 2, "max_turns": 2, "max_new_tokens": 2},
        "max_context_tokens": 256,
    },
    "evaluation": {"split": "train", "tasks": 1, "greedy": False},
    "stop": {"batches": 1},
}
RUNS: dict[str, dict[str, Any]] = {
    "1": {
        **{"env": "acme/Echo-v1", "algorithm": "acme/Mean-v1", "reward": "env-return"},
        "scoring": {"backend": "acme/Threads-v1"},
    },
    "2": {
        **{"env": "acme/Step-v1", "algorithm": "acme/Algorithm-v1"},
        **{"reward": "acme/StepReward-v1", "mapper": "acme/Mapper-v1"},
    },
    "2, agent": {"env": "acme/Agent-v1", "reward": "acme/Reward-v1"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("site")
    for wheel in WHEELS:
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def rollart(site: Path, *argv: str | Path) -> dict[str, Any]:
    """Return what a command prints with ``--json``."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    process = start_program(*map(str, argv), "--json", cwd=site, environment=environment)
    out, err = process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    return json.loads(out)


def test_they_are_of_the_versions_that_run() -> None:
    assert set(VERSIONS.values()) == {OLDEST_PLUGIN_API, PLUGIN_API}


def test_each_is_listed_and_none_is_broken(site: Path) -> None:
    listed = rollart(site, "list")
    assert listed.pop("broken") == []
    assert set(VERSIONS) <= {entry["id"] for entries in listed.values() for entry in entries}


@pytest.mark.parametrize("plugin_id", ["acme/Echo-v1", "acme/Step-v1", "acme/Agent-v1"])
def test_an_environment_passes_every_check(plugin_id: str, site: Path) -> None:
    outcomes = [one["outcome"] for one in rollart(site, "check", plugin_id)["results"]]
    assert "PASS" in outcomes
    assert "FAIL" not in outcomes


@pytest.mark.parametrize("plugins", RUNS)
def test_they_train(plugins: str, site: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**RUN, **RUNS[plugins], "runs_dir": str(tmp_path / "runs")}))
    report = rollart(site, "run", config)
    assert (report["ok"], report["batches"]) == (True, 1)
    assert report["envs"][RUNS[plugins]["env"]]["trained"] == 2
