"""The scripts that start a cluster, run on this machine: a head, a node, and a run that joins them.

GPUs are counted, not there: Ray takes our word for them, and gives each engine its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support import patient_ray as patient
from support.pace import scaled
from support.patient_ray import patient_ray
from support.ray_runs import (
    PLACEMENT_S,
    TEST_PATHS,
    assert_none_left,
    processes_with,
)
from support.whole_runs import num_trained, wait_for_batches

from rollart_core.config.runtime import RayRuntime
from rollart_core.store.audit import audit
from rollart_core.training.process_group import own_address
from rollart_plugins.engines.server_process import free_port
from rollart_ray import local as ray_local
from rollart_ray.cluster import RayCluster
from rollart_ray.pools import ResourceSlot
from rollart_ray.worker import ActorSettings, RayWorker, Reservation

SCRIPTS = Path(__file__).parents[4] / "scripts"
BIN = Path(sys.executable).parent
NOT_UP = "a node is not up within"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RUN = f"""
name: small
mode: sync
runtime:
  kind: ray
  num_engines: 1
  placement_s: {PLACEMENT_S}
  pools:
    - {{name: train, device: H100, count: 1, resources: {{GPU: 1, train: 1}}, roles: [trainer]}}
    - {{name: gen, device: H100, count: 2, resources: {{GPU: 1, gen: 1}}, roles: [engines]}}
    - {{name: cores, count: 2, resources: {{CPU: 1}}, roles: [envs]}}
model: {{kind: new, num_layers: 1, width: 32, num_heads: 1, head_dim: 32, vocab_size: 320}}
env: {{id: toy/FrozenLake-v1, hint: false}}
rollout: {{groups_per_batch: 2, group_size: 2, max_turns: 2, max_new_tokens: 2}}
evaluation: {{tasks: 2, greedy: false}}
trackers: []
stop: {{batches: 1}}
"""


def visible_devices() -> str:
    """Return what of the machine's GPUs this process sees (called in an actor)."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A token, a port and a short folder of the test's own; no process is left behind."""
    folder = ray_local.LocalFolder()
    (folder.path / "token").unlink()  # head.sh makes one
    port = free_port()
    program = folder.path / "ray"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {patient.__file__} "$@"\n')
    program.chmod(0o755)
    own = {
        **{"RAY_AUTH_TOKEN_PATH": str(folder.token), "TEMP_DIR": folder.temp_dir, "BLOCK": "1"},
        **{"HEAD_IP": own_address(), "PORT": str(port), "HEAD": f"{own_address()}:{port}"},
        **{"RAY": str(program), "NUM_GPUS": "4", "NUM_CPUS": "2", "OMP_NUM_THREADS": "1"},
    }
    mine = str(folder.path).encode()
    try:
        with patient_ray():
            yield {**os.environ, **own}
        assert_none_left(mine)
    finally:
        for pid in processes_with(mine):
            os.kill(pid, signal.SIGKILL)
        folder.remove()


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a script, and wait until its node is up."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return process
    raise (ConnectionError if NOT_UP in "".join(said) else AssertionError)("".join(said))


def ended(process: subprocess.Popen[str]) -> None:
    """End a node as its script is ended, and wait for it."""
    process.terminate()
    process.communicate()  # the test's timeout ends the wait


def ran(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it said.

    Raises:
        TimeoutError: If that takes too long.
        ConnectionError: If a node of Ray's did not come up.
    """
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=scaled(480),
        )
    except subprocess.TimeoutExpired as e:
        raise TimeoutError(f"{e}: {(e.stderr or b'')[-3000:]!r}") from e
    if NOT_UP in done.stdout + done.stderr:
        raise ConnectionError(done.stderr[-3000:])
    return done


def test_an_engine_over_two_gpus_sees_two_of_its_own(environment: dict[str, str]) -> None:
    refused = ran([SCRIPTS / "node.sh", "gen"], environment)
    assert refused.returncode == 1
    assert "there is no token at" in refused.stderr
    head = started([str(SCRIPTS / "head.sh"), "gen"], environment)
    mine = {k: environment[k] for k in ("RAY_AUTH_TOKEN_PATH",)} | {"RAY_AUTH_MODE": "token"}
    try:
        with ray_local.variables(mine):
            ray_local.read_token_anew()
            seen = asyncio.run(_seen(environment["HEAD"]))
    finally:
        ended(head)
        ray_local.read_token_anew()
    first, second = (set(devices.split(",")) for devices in seen)
    assert len(first) == len(second) == 2
    assert not first & second


async def _seen(address: str) -> list[str]:
    """Return the GPUs that two parts see, each in a slot of two."""
    cluster = RayCluster(RayRuntime(address=address, placement_s=PLACEMENT_S), "seen", 2)
    cluster.open()
    slots = [ResourceSlot("engine", "gen", {"GPU": 2.0, "gen": 2.0}, {})] * 2
    settings = ActorSettings({}, None, TEST_PATHS)
    parts = []
    try:
        assert {n.resources.get("gen") for n in cluster.nodes()} == {4.0}
        group = await cluster.reserve(slots, "SPREAD")
        for index, slot in enumerate(slots):

            async def reserved(index: int = index, slot: ResourceSlot = slot) -> Reservation:
                return Reservation(slot, group, index)

            part = RayWorker(f"engine-{index}", cluster, reserved, settings)
            parts.append(part)
            await part.start()
        return [await part.call("test_cluster_scripts:visible_devices") for part in parts]
    finally:
        for part in parts:
            await part.close()
        cluster.close()


SCONTROL = """#!/bin/sh
case "$1" in
    show) echo one; echo two ;;
    *) echo "$*" >> "$SLURM_SUBMIT_DIR/scontrol.log" ;;
esac
"""
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
"""As Slurm's, for two nodes that are one machine."""


def test_a_slurm_job_starts_its_cluster_and_joins_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text(RUN)
    job = {
        **{"PATH": f"{tmp_path}:{BIN}:{environment['PATH']}", "KINDS": "train gen"},
        **{"SCRIPTS": str(SCRIPTS), "SLURM_JOB_NODELIST": "x", "SLURM_SUBMIT_DIR": str(tmp_path)},
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "small"},
    }
    command = ["bash", str(SCRIPTS / "slurm.sbatch"), "run.yaml", f"runs_dir={tmp_path}/runs"]
    run_dir = _preempted([*command, "stop.batches=100000"], environment | job, tmp_path)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert run_dir.name.startswith("small-7-")
    num_batches = num_trained(run_dir) + 1
    done = ran([*command, f"stop.batches={num_batches}"], environment | job, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((tmp_path / "runs").iterdir()) == [run_dir]
    assert num_trained(run_dir) == num_batches
    assert audit(run_dir).ok
    short = ran(command, environment | job | {"KINDS": "train"})
    assert short.returncode == 1
    assert "KINDS has 1 words, but the job has 2 nodes" in short.stderr


def _preempted(command: list[str], environment: Mapping[str, str], folder: Path) -> Path:
    """Send SIGUSR1 to a job that trains, as Slurm does, and return the directory of its run."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        run_dir = wait_for_batches(folder / "runs", 1, process)
    except AssertionError as e:
        raise (ConnectionError if NOT_UP in str(e) else AssertionError)(str(e)[-3000:]) from None
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate()
    assert process.returncode == 75, said[-3000:]
    return run_dir


def test_the_mission_says_what_its_command_says_and_takes_all_of_it_down(
    environment: dict[str, str], repo_root: Path
) -> None:
    """Three nodes and the head answer the command; its exit code is the scripts'."""
    before = set(Path("/tmp").glob("rollart-nodes-*"))
    count = "import ray, sys; ray.init('auto', log_to_driver=False); sys.exit(len(ray.nodes()))"
    mission = repo_root / "examples/mission"
    own = {
        **{"MISSION_DOCKER_HOSTS": "unix:///a,unix:///b", "MISSION_PYTHON": sys.executable},
        "MISSION_PORT": environment["PORT"],
    }
    command = [mission / "engines", mission / "nodes", sys.executable, "-c", count]
    done = ran(command, environment | own)
    assert done.returncode == 4, done.stdout[-3000:] + done.stderr[-3000:]
    assert set(Path("/tmp").glob("rollart-nodes-*")) == before
