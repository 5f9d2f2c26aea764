"""A stranger's package, installed by pip, in a whole run whose workers are other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollart_core.store.journal_reader import JournalReader, read_trajectories

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-footsteps"
version = "2.5"

[project.entry-points.rollart]
acme-footsteps = "acme_footsteps.plugin"

[tool.setuptools]
packages = ["acme_footsteps"]
package-data = { acme_footsteps = ["rollart.yaml"] }
"""
MANIFEST = """
contract_version: 2
licence: MIT
environments:
  - id: acme/Footsteps-v1
    alias: footsteps
    entry_point: acme_footsteps.parts:FootstepsEnv
rewards:
  - id: acme/Vowels-v1
    alias: vowels
    entry_point: acme_footsteps.parts:Vowels
"""
PLUGIN = """
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs

@hookimpl
def rollart_environments():
    return specs(__package__, "environments")

@hookimpl
def rollart_rewards():
    return specs(__package__, "rewards")
"""
PARTS = '''
import json
import os
import sys

import gymnasium

from rollart_core.contracts.reward import Reward, RewardResult
from rollart_core.spaces import Text


class FootstepsEnv(gymnasium.Env):
    """Leaves a line in a file wherever it is made."""

    def __init__(self, *, footsteps):
        self.observation_space, self.action_space = Text(), Text()
        line = {"pid": os.getpid(), "parent": os.getppid()}
        line["cli"] = "rollart_core.cli" in sys.modules
        with open(footsteps, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\\n")

    def num_tasks(self, split):
        return 8

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say something with vowels", {}

    def step(self, action):
        return "", 0.0, True, False, {"success": "a" in action}

    def corpus(self):
        yield from ("say something with vowels", "a", "eio", "xyz")


class Vowels(Reward):
    def score(self, request):
        text = request.messages[-1]["content"]
        return RewardResult(sum(map(text.count, "aeiou")) / max(1, len(text)))
'''
CONFIG = """
name: foreign
model: {{kind: new, num_layers: 1, width: 32, ffn_width: 48, vocab_size: 320}}
env: {{id: footsteps, footsteps: {footsteps}}}
reward: vowels
runtime: {{kind: inline, env_processes: 2}}
trackers: []
rollout: {{groups_per_batch: 2, group_size: 4, max_turns: 1, max_new_tokens: 4,
          max_context_tokens: 128}}
evaluation: {{tasks: 4, greedy: false}}
stop: {{batches: 2}}
runs_dir: {runs}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package, metadata and all."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    package = source / "acme_footsteps"
    package.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN)
    (package / "parts.py").write_text(PARTS)
    (package / "rollart.yaml").write_text(MANIFEST)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(target), str(source)], check=True)
    assert (target / "acme_footsteps-2.5.dist-info").is_dir()
    return target


@pytest.mark.slow
def test_workers_find_a_package_that_only_pip_told_them_of(site: Path, tmp_path: Path) -> None:
    footsteps, config = tmp_path / "footsteps.jsonl", tmp_path / "run.yaml"
    config.write_text(CONFIG.format(footsteps=footsteps, runs=tmp_path / "runs"))
    environ = {k: v for k, v in os.environ.items() if k != "ROLLART_PLUGINS"}
    environ["PYTHONPATH"] = str(site)
    command = "import os; from rollart_core.cli import main; print(os.getpid(), flush=True); main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "run", str(config), "--json"],
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
        cwd=tmp_path,
    ) as driver:
        assert driver.stdout is not None
        driver_pid = int(driver.stdout.readline())
        report = json.loads(driver.stdout.read())
    assert driver.returncode == 0
    assert report["batches"] == 2
    assert not report["failures"]

    made = [json.loads(line) for line in footsteps.read_text().splitlines()]
    # Two env workers, and whoever made the model's tokenizer from the environment's text.
    assert len({line["pid"] for line in made}) >= 2
    assert driver_pid not in {line["pid"] for line in made}
    assert {line["parent"] for line in made} == {driver_pid}
    # Nor are they copies of the driver's memory: they never loaded the command line.
    assert not any(line["cli"] for line in made)

    run_dir = Path(report["run_dir"])
    with JournalReader(run_dir) as reader:
        assert {ticket.state for ticket in reader.tickets()} >= {"trained"}
    trajectories = list(read_trajectories(run_dir))
    assert {t.ticket.task.env_id for t in trajectories} == {"acme/Footsteps-v1"}
    assert len({t.reward for t in trajectories}) > 1
    assert "acme-footsteps" in (run_dir / "config.yaml").read_text()
