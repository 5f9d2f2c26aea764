"""``rollart doctor`` says what each machine lacks for a run, and what to fix."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fork_server
from support.whole_runs import run, write

from rollart_core.errors import ConfigError
from rollart_core.runtime.prepare import prepare
from rollart_plugins.doctor import (
    ask_for_facts,
    ask_to_connect,
    examine,
    findings_of,
    gpus_of,
    slow_pairs,
)
from rollart_ray.nodes import ask_for_model, clock_faults, model_faults

GIB = 2**30
GPUS = "NVIDIA H100 80GB HBM3, 81559, 4, 550.54\nNVIDIA H100 80GB HBM3, 81559, 60000, 550.54"
FINE: Mapping[str, Any] = {
    "gpus": GPUS.splitlines()[0],
    "cuda": "12.4 True",
    "versions": {"torch": "2.13.0"},
    "shm_free": 64 * GIB,
    "disk_free": 500 * GIB,
    "memory_free": 64 * GIB,
    "links": "",
    "locked_bytes": -1,
    "open_files": 65536,
    "cores": 16,
    "servers": {"sglang": "0.5.23"},
}


def bad(facts: Mapping[str, Any], *, on_gpu: bool = True) -> dict[str, tuple[str, str]]:
    found = list(findings_of(facts, 8_000_000_000, on_gpu=on_gpu))
    assert all(f.mend for f in found if f.state == "bad")
    return {f.what: (f.says, f.mend) for f in found if f.state == "bad"}


def test_a_machine_that_has_everything():
    assert bad(FINE) == {}


@pytest.mark.parametrize(
    ("facts", "what", "says"),
    [
        ({"gpus": ""}, "GPUs", "none"),
        ({"gpus": "error: Driver/library version mismatch"}, "driver", "version mismatch"),
        ({"cuda": " False"}, "driver", "CUDA none: torch does not see the GPUs"),
        ({"gpus": GPUS}, "GPU 1", "62.9 of 85.5 GB used"),
        ({"disk_free": GIB}, "disk", "1.07 GB free, a checkpoint needs 96 GB"),
        ({"open_files": 1024}, "open files", "at most 1024"),
        ({"servers": {"vllm": "error: StopIteration"}}, "vllm", "is not installed"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(facts: dict[str, Any], what: str, says: str):
    found = bad({**FINE, **facts})
    assert list(found) == [what]
    assert says in found[what][0]


def test_a_run_on_the_cpu_needs_no_gpu():
    assert bad({**FINE, "gpus": ""}, on_gpu=False) == {}


def test_gpus_are_read_from_the_drivers_csv():
    first, second = gpus_of(GPUS)
    assert (first.name, first.driver) == ("NVIDIA H100 80GB HBM3", "550.54")
    assert second.used_bytes == 60000 * 2**20


LINKS = """\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\tN/A
GPU1\tNV18\t X \tPHB\tNODE\t0-47\t0\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks"""


def test_slow_links_and_little_locked_memory_are_warnings():
    assert slow_pairs(LINKS) == ["GPU 0 and GPU 2 (SYS)", "GPU 1 and GPU 2 (PHB)"]
    slow = {**FINE, "links": LINKS, "locked_bytes": 8 * 10**9}
    found = {f.what: f for f in findings_of(slow, 0, on_gpu=True)}
    assert found["links"].says == "no NVLink between GPU 0 and GPU 2 (SYS), and 1 more"
    assert found["locked memory"].says == "at most 8 GB"
    assert found["links"].state == found["locked memory"].state == "warn"
    fast = {**FINE, "links": LINKS.replace("SYS", "NV4").replace("PHB", "NV4")}
    found = {f.what: f for f in findings_of(fast, 0, on_gpu=True)}
    assert found["links"].state == found["locked memory"].state == "ok"
    alone = {f.what for f in findings_of({**FINE, "gpus": ""}, 0, on_gpu=False)}
    assert not alone & {"links", "locked memory"}


def test_facts_are_those_of_this_machine(tmp_path: Path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    facts = ask_for_facts(str(tmp_path / "new"), {"sglang": str(tmp_path / "python"), "vllm": ""})()
    assert facts["versions"]["rollart"]
    assert facts["cores"] >= 1
    assert min(facts["shm_free"], facts["disk_free"], facts["memory_free"]) > 0
    assert facts["servers"]["vllm"].startswith("error")
    assert list(findings_of(facts, 0, on_gpu=False))


def diagnosed(folder: Path, *changes: str, **config: Any) -> tuple[int, dict[str, Any]]:
    path = write(folder, {"stop": {"batches": 1}, "reward": None, **config})
    program = fork_server.start_program("doctor", str(path), "--json", *changes, cwd=folder)
    out, _ = program.communicate()
    return program.returncode, json.loads(out)


def with_gpus(folder: Path, csv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi first on PATH that reports these GPUs."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ $1 = topo ] && exit 9\ncat <<'END'\n{csv}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_the_gpus_that_the_driver_reports_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_gpus(tmp_path, GPUS, monkeypatch)
    facts = ask_for_facts(str(tmp_path), {})()
    found = {f.what: f for f in findings_of(facts, 0, on_gpu=True)}
    assert found["driver"].state == "bad"  # the torch of tests has no CUDA
    assert (found["GPU 0"].state, found["GPU 1"].state) == ("ok", "bad")
    assert "62.9 of 85.5 GB used" in found["GPU 1"].says


def test_the_machines_are_shown_although_a_preflight_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(total=10_000, used=0, free=10_000)
    monkeypatch.setattr("rollart_core.runtime.inline.shutil.disk_usage", lambda path: usage)
    config = write(tmp_path, {"stop": {"batches": 1}, "reward": None})
    found = asyncio.run(examine(prepare(str(config), [f"runs_dir={tmp_path / 'runs'}"]), print))
    states = {d.finding.what: d.finding.state for d in found}
    assert states["preflight checks"] == "bad"
    assert states["open files"] == states["clocks"] == "ok"
    assert not any(what.startswith("all-reduce") for what in states)


def test_a_port_that_nobody_can_reach_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # it does not listen
        why = ask_to_connect(f"127.0.0.1:{port}", 5.0)()
        assert "refused" in why
        listener.listen()
        assert ask_to_connect(f"127.0.0.1:{port}", 5.0)() == ""
    monkeypatch.setattr("rollart_plugins.doctor.ask_to_connect", lambda *of: lambda: why)
    config = write(tmp_path, {"stop": {"batches": 1}, "reward": None})
    found = asyncio.run(examine(prepare(str(config), [f"runs_dir={tmp_path / 'runs'}"]), print))
    (bad_one,) = (d.finding for d in found if d.finding.state == "bad")
    assert bad_one.says.startswith("cannot connect to ")
    assert "firewalls" in bad_one.mend


def test_two_ranks_sum_a_tensor_and_nothing_is_left(tmp_path: Path):
    code, said = diagnosed(tmp_path, runtime={"kind": "inline", "num_trainer_ranks": 2})
    assert code == 0, said
    assert said["works"]
    states = {f["what"]: f["state"] for f in said["findings"]}
    assert states["all-reduce of 2 ranks"] == states["clocks"] == states["packages"] == "ok"
    assert states["trainer's ports"] == states["preflight checks"] == "ok"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_config_that_cannot_run_is_a_finding(tmp_path: Path):
    code, said = diagnosed(tmp_path, "rollout.group_size=0")
    assert code == 1
    (finding,) = said["findings"]
    assert finding["what"] == "config"
    assert "rollout.group_size" in finding["says"]


def test_too_little_shared_memory_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(total=10_000, used=0, free=10_000)
    monkeypatch.setattr("rollart_core.runtime.inline.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"has 1e-05 GB free, but 2 versions of the weights need"):
        run(tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not (run_dir / "logs").exists()


def test_models_that_differ_are_named():
    here = {"config.json": "10 abc", "model.safetensors": "99"}
    answers = {"a": here, "b": dict(here), "c": {**here, "model.safetensors": "98"}, "d": {}}
    other, none = model_faults("/models/m", answers)
    assert other.startswith("node c has another model in /models/m than node a (model.safetensors")
    assert none.startswith("node d has no /models/m: put the model on a file system")
    assert model_faults("/models/m", {"a": here, "b": here}) == []


def test_a_models_files_are_compared_by_size_and_digest(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = ask_for_model(str(tmp_path))()
    assert before["model.safetensors"] == "4"
    (tmp_path / "config.json").write_text("[]")
    assert ask_for_model(str(tmp_path))() != before
    assert ask_for_model(str(tmp_path / "none"))() == {}


def test_a_clock_is_wrong_only_if_the_time_of_the_answer_cannot_explain_it():
    assert clock_faults([(100.0, {"a": 99.1, "b": 103.0, "c": 104.9}, 104.0)]) == []
    slow, fast = clock_faults([(100.0, {"a": 98.0, "b": 107.5, "c": 102.0}, 104.0)])
    assert slow.startswith("the clock of node a differs by at least 2.0 s")
    assert fast.startswith("the clock of node b differs by at least 3.5 s")


def test_the_narrowest_answer_decides_about_a_clock():
    rounds = [(100.0, {"a": 104.0}, 106.0), (107.0, {"a": 109.0}, 107.5)]
    (fault,) = clock_faults(rounds)
    assert "at least 1.5 s" in fault
