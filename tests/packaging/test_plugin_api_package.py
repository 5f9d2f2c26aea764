"""A package for the last version of the plugin API: installed beside the wheel, checked, run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fresh_venvs import clean_environ, fresh_venv, lend, pip_install, sh

from rollart_core import OLDEST_PLUGIN_API, PLUGIN_API

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IDS = {
    "environments": "acme/Echo-v1",
    "algorithms": "acme/Mean-v1",
    "reward_backends": "acme/Threads-v1",
}
CONFIG = """
name: first
model: {kind: new, num_layers: 1, width: 32, ffn_width: 48, vocab_size: 300}
env: acme-echo
algorithm: acme-mean
reward: env-return
scoring: {backend: acme-threads}
trackers: []
rollout: {groups_per_batch: 2, group_size: 4, max_turns: 1, max_new_tokens: 4,
          max_context_tokens: 96}
evaluation: {split: train, tasks: 4, greedy: false}
stop: {batches: 2}
runs_dir: runs
"""


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, so that building it leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("source") / "acme-first"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(repo_root / "tests/packaging/plugin_api_1", folder, ignore=skip)
    return folder


@pytest.fixture(scope="module")
def package(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel."""
    folder = tmp_path_factory.mktemp("package")
    sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    (built,) = folder.glob("acme_first-1.0-*.whl")
    return built


@pytest.fixture(scope="module")
def site(
    wheel: Path, wheelhouse: Path, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A virtual environment with both wheels; that of the tests lends torch, and comes last."""
    folder = tmp_path_factory.mktemp("last-api")
    made = fresh_venv(folder / "venv", wheelhouse, "--no-deps", wheel)
    lend(made)
    pip_install(made, wheelhouse, package)
    return made


def test_it_is_the_version_before_todays(source: Path) -> None:
    manifest = (source / "acme_first/rollart.yaml").read_text()
    assert f"contract_version: {OLDEST_PLUGIN_API}\n" in manifest
    assert PLUGIN_API - 1 == OLDEST_PLUGIN_API


def test_it_is_listed_and_nothing_is_broken(site: Path, tmp_path: Path) -> None:
    listed = json.loads(sh(site / "bin/rollart", "list", "--json", cwd=tmp_path))
    assert listed["broken"] == []
    for kind, plugin_id in IDS.items():
        (entry,) = [e for e in listed[kind] if e["id"] == plugin_id]
        assert entry["distribution"] == "acme-first"


@pytest.mark.parametrize("plugin_id", IDS.values())
def test_it_passes_every_check(plugin_id: str, site: Path, tmp_path: Path) -> None:
    done = rollart(site, tmp_path, "check", plugin_id, "--json")
    report = json.loads(done.stdout)
    wrong = [r for r in report["results"] if r["outcome"] == "FAIL"]
    assert (wrong, done.returncode) == ([], 0)
    assert [r for r in report["results"] if r["outcome"] == "PASS"]


def test_it_trains_and_is_told_what_replaces_the_old_forms(site: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = rollart(site, tmp_path, "run", "run.yaml", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["batches"] == 2
    # the trainer is a process of its own, which has a log of its own
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/logs/*"))
    assert "set in_process: true" in done.stderr
    assert "write extra_modules(self, hidden_size)" in logs
    assert "Traceback" not in done.stderr


def test_one_for_a_newer_version_is_broken_and_says_why(
    package: Path, site: Path, tmp_path: Path
) -> None:
    newer, ahead = tmp_path / "newer", PLUGIN_API + 1
    zipfile.ZipFile(package).extractall(newer)
    manifest = newer / "acme_first/rollart.yaml"
    manifest.write_text(manifest.read_text().replace("version: 1", f"version: {ahead}"))
    env = {"PYTHONPATH": str(newer)}  # it hides the one that is installed
    listed = json.loads(sh(site / "bin/rollart", "list", "--json", cwd=tmp_path, extra=env))
    (broken,) = listed["broken"]
    assert f"contract version {ahead}, this RollArt supports 1 and 2: upgrade" in broken["reason"]
    assert "toy/FrozenLake-v1" in {e["id"] for e in listed["environments"]}


def rollart(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [site / "bin/rollart", *arguments],
        cwd=folder,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
