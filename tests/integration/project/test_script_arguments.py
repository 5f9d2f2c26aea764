"""What the scripts of clusters and of the mission are told, and lack, is said before they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MISSION = "examples/mission"
FAKE_RAY = '#!/bin/sh\necho "ray $*"\necho "Next steps: of Ray"\n'
Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a script of the repository in an empty folder, with a token and a Ray that only talks."""
    ray = tmp_path / "ray"
    ray.write_text(FAKE_RAY)
    ray.chmod(0o755)
    (tmp_path / "token").write_text("secret")
    strange = ("SLURM_", "MISSION_", "HEAD", "BLOCK", "AS_HEAD", "NODE_IP", "TEMP_DIR")
    mine = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    mine |= {"RAY": str(ray), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "NUM_GPUS": "2"}
    mine |= {"PORT": "6379", "NUM_CPUS": "4"}

    def run(name: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / name), *words]
        return subprocess.run(
            command, env=mine | more, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.parametrize("name", ["head.sh", "node.sh"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_scripts_own_comment(script: Script, name: str, word: str) -> None:
    done = script(f"scripts/{name}", word)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"scripts/{name} KIND" in done.stdout
    assert "RAY_AUTH_TOKEN_PATH" in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("head.sh", ("train", "gen"), "head.sh: expected at most one kind, not 'train gen'"),
        ("head.sh", ("Train",), "head.sh: 'Train' is not a valid kind: use a word of a-z, "),
        ("head.sh", ("--port",), "head.sh: '--port' is not a valid kind"),
        ("node.sh", (), "node.sh: give one kind of node, a word of a-z"),
        ("node.sh", ("train", "gen"), "not 'train gen'"),
        ("node.sh", ('a": 1, "b',), """not 'a": 1, "b'"""),
    ],
)
def test_other_words_are_refused(
    script: Script, name: str, words: tuple[str, ...], says: str
) -> None:
    done = script(f"scripts/{name}", *words, HEAD="10.0.0.1:6379")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_last_word_is_what_comes_next_with_rollart(script: Script) -> None:
    done = script("scripts/head.sh", "train", HEAD_IP="10.0.0.1")
    assert done.returncode == 0, done.stderr
    first, _, after = done.stdout.partition("Next steps: of Ray\n")
    assert '--resources={"train": 2}' in first
    assert "HEAD=10.0.0.1:6379 scripts/node.sh KIND" in after
    assert "RAY_AUTH_MODE=token rollart run CONFIG runtime.address=10.0.0.1:6379" in after
    assert 'IP is the "Local node IP" above' in script("scripts/head.sh").stdout
    joined = script("scripts/node.sh", "gen", HEAD="10.0.0.1:6379")
    assert joined.stdout.splitlines()[-1].startswith("This machine is a node of kind gen")
    held = script("scripts/node.sh", "gen", HEAD="10.0.0.1:6379", BLOCK="1")
    assert held.stdout.endswith("Next steps: of Ray\n")  # it is Ray itself from then on


def test_outside_of_slurm_the_job_says_how_to_submit_it(script: Script) -> None:
    for words in ((), ("run.yaml",), ("--help",)):
        done = script("scripts/slurm.sbatch", *words)
        assert done.returncode == 1
        assert "this is not a Slurm job: submit it with sbatch: KINDS=" in done.stderr


SLURM_PROGRAMS = {
    "scontrol": '#!/bin/sh\n[ "$1" = show ] && echo one || echo "$*" >> scontrol.log\n',
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "rollart": "#!/bin/bash\ntrap 'exit 75' USR1 TERM; echo \"$*\" > asked\n"
    "while :; do sleep 0.05; done\n",
}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_requeues_a_preempted_job_but_no_cancelled_one(tmp_path: Path, number: int) -> None:
    """Slurm sends SIGUSR1 as ``--signal`` asks, and SIGTERM to a job that a user cancels."""
    for name, text in SLURM_PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "token").write_text("secret")
    job = {
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "KINDS": "train", "PYTHON": "true"},
        **{"SLURM_JOB_NODELIST": "x", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7"},
        **{"RAY": "true", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "HEAD_IP": "10.0.0.1"},
        "SLURM_JOB_NAME": "webshop",
    }
    command = ["bash", str(ROOT / "scripts/slurm.sbatch"), "run.yaml", "trainer.lr=1e-6"]
    with subprocess.Popen(command, env=os.environ | job, cwd=tmp_path) as process:
        while not (tmp_path / "asked").exists() or not (tmp_path / "asked").read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait() == 75
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == (
        "requeue 7\n" if number == signal.SIGUSR1 else ""
    )
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:5] == ["run", "run.yaml", "--resume", "auto", "name=webshop-7"]
    assert asked[5:] == ["runtime.address=10.0.0.1:6379", "trainer.lr=1e-6"]


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("setup", ("no/python",), "there is no Python no/python: `make setup` makes"),
        ("setup", ("./bare",), "./bare cannot import rollart_core: ./bare -m pip install -e"),
        ("engines", (), "say which command: examples/mission/engines COMMAND..."),
        ("engines", ("no-such-program",), "there is no program no-such-program to run"),
        ("engines", ("true",), "there is no Python .venv/bin/python: `make setup` makes"),
        ("nodes", ("no-such-program",), "there is no program no-such-program to run"),
        ("nodes", ("true",), "makes .venv/bin/python; or set MISSION_PYTHON"),
    ],
)
def test_the_mission_looks_before_it_starts_anything(
    script: Script, tmp_path: Path, name: str, words: tuple[str, ...], says: str
) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = script(f"{MISSION}/{name}", *words)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"examples/mission/{name}: ")
    assert says in line
    assert not (tmp_path / ".mission").exists()


def test_nodes_need_rays_own_program(script: Script, tmp_path: Path) -> None:
    done = script(f"{MISSION}/nodes", "true", MISSION_PYTHON=sys.executable, RAY="no/ray")
    assert done.returncode == 1
    assert "there is no no/ray: pip install -e '.[ray]', or set RAY" in done.stderr
