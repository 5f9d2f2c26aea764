"""A Ray of this machine that a run starts: nothing of it outlives the run, however that ends.

When its raylet is killed the run ends, and `--resume` goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.pace import wait_until
from support.patient_ray import patient_ray
from support.ray_runs import PLACEMENT_S, assert_none_left, processes_with

from rollart_core.config.load import dump_yaml
from rollart_core.errors import JournalError
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader
from rollart_ray import local as ray_local

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
WITHIN_S = 240.0
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They try for a minute to tell the head that their node is gone, and then end."""
CONFIG = {
    "name": "local",
    "runtime": {"kind": "ray", "num_env_workers": 2, "placement_s": PLACEMENT_S},
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


MAIN = "from rollart_core.cli import main; main()"
AUDIT = Path(__file__).parents[4] / "scripts" / "audit_journal.py"


def _folders(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"rollart-ray-{pid}-*"))


@pytest.fixture(scope="session")
def gone_at_the_end() -> Iterator[list[bytes]]:
    """Texts that no process may have in its environment when all tests are over."""
    texts: list[bytes] = []
    yield texts
    for text in texts:
        assert_none_left(text, limit_s=120)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_of_it_is_left(
    tmp_path: Path, number: signal.Signals, gone_at_the_end: list[bytes]
) -> None:
    config = tmp_path / "local.yaml"
    config.write_text(dump_yaml({**CONFIG, "runs_dir": str(tmp_path / "runs")}))
    said = tmp_path / "said"
    command = [sys.executable, "-c", MAIN, "run", str(config), "--json"]
    with said.open("wb") as out, patient_ray():
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out)
    try:
        wait_until(
            lambda: b"train: grpo" in said.read_bytes() or run.poll() is not None,
            "the beginning of training",
            limit_s=WITHIN_S,
        )
        assert run.poll() is None, said.read_text()
        (folder,) = _folders(run.pid)
        token = f"RAY_AUTH_TOKEN_PATH={folder}/token".encode()
        assert processes_with(token, besides=run.pid)
        run.send_signal(number)
        code = wait_until(
            lambda: run.poll() is not None and run.poll(), "its end", limit_s=WITHIN_S
        )
        assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
        if number is signal.SIGKILL:
            assert_none_left(token, besides=run.pid, but=AGENTS)
            gone_at_the_end.append(token)
            ray_local.remove_orphans(Path("/tmp"))  # as the next run does
        else:
            assert_none_left(token, besides=run.pid)
        assert not _folders(run.pid)
    finally:
        run.kill()
        run.communicate()
    assert os.environ.get("RAY_AUTH_TOKEN_PATH") is None


def _num_trained(runs_dir: Path) -> int:
    """Return how many batches the only run in a folder has trained."""
    for journal_db in runs_dir.glob("*/journal.db"):
        with suppress(JournalError), JournalReader(journal_db.parent) as journal:
            return sum(batch.state == "trained" for batch in journal.batches())
    return 0  # it is not there, or only just being made


def test_a_run_whose_raylet_is_killed_ends_with_one_line_and_resumes(tmp_path: Path) -> None:
    config, runs_dir, said = tmp_path / "local.yaml", tmp_path / "runs", tmp_path / "said"
    more = {"runs_dir": str(runs_dir), "checkpoint": {"every_batches": 2}}
    config.write_text(dump_yaml({**CONFIG, **more}))
    command = [sys.executable, "-c", MAIN, "run"]
    with said.open("wb") as out, patient_ray():
        run = subprocess.Popen(
            [*command, str(config), "--json"], stdout=subprocess.PIPE, stderr=out
        )
    try:
        wait_until(
            lambda: run.poll() is not None or (_num_trained(runs_dir) >= 3),
            "three batches",
            limit_s=WITHIN_S,
        )
        assert run.poll() is None, said.read_text()
        (folder,) = _folders(run.pid)
        token = f"RAY_AUTH_TOKEN_PATH={folder}/token".encode()
        found = processes_with(token, besides=run.pid)
        (raylet,) = (pid for pid, argv in found.items() if argv.split()[0].endswith("/raylet"))
        os.kill(raylet, signal.SIGKILL)
        code = wait_until(
            lambda: run.poll() is not None and [run.poll()], "its end", limit_s=WITHIN_S
        )
    finally:
        run.kill()
        run.communicate()
    assert code == [1], said.read_text()
    error = said.read_text().splitlines()[-1]
    assert error.startswith("Error: the raylet of the Ray that this run started, its only node")
    (run_dir,) = runs_dir.iterdir()
    assert error.endswith(f"rollart run --resume {run_dir}")
    assert "restarted" not in said.read_text()
    assert_none_left(token, but=AGENTS)
    goal = _num_trained(runs_dir) + 2
    resume = [*command, "--resume", str(run_dir), f"stop.batches={goal}", "--json"]
    with patient_ray():
        again = subprocess.run(resume, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    report = audit(run_dir)
    assert report.ok, report.violations
    assert (report.batches, report.open) == (goal, 0)
    subprocess.run([sys.executable, AUDIT, run_dir], check=True, stdout=subprocess.DEVNULL)
