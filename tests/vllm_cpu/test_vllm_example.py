"""``examples/vllm.yaml`` runs as it is, with fewer episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_vllm import command
from support.pace import scaled

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SHORT = (
    "stop={batches: 2}",
    "warm_start={until_success: 0.3, max_train_steps: 10, check_tasks: 4, check_every: 10}",
    "rollout.groups_per_batch=2",
    "rollout.group_size=4",
    "evaluation={split: test, tasks: 4}",
)


@pytest.mark.nightly
def test_the_example_trains_through_its_two_servers(repo_root, tmp_path):
    assert command()[1].endswith("tests/vllm_cpu/serve_vllm.py")
    argv = [str(Path(sys.executable).parent / "rollart"), "run", "examples/vllm.yaml", "--json"]
    run = subprocess.run(
        [*argv, *SHORT, f"engine.start_s={scaled(900)}", f"runs_dir={tmp_path}"],
        cwd=repo_root,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 0
    report = json.loads(run.stdout)
    assert report["ok"]
    assert report["failures"] == {}
    scheduler = report["scheduler"]
    assert (report["batches"], scheduler["policy_version"], scheduler["trained"]) == (2, 2, 16)
