from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollart_sandboxes.pool import machine
from rollart_sandboxes.pool.admission import BUSY_WAIT_S, SETTLE_S, SandboxNeeds, decide
from rollart_sandboxes.pool.live import SandboxRecord
from rollart_sandboxes.pool.machine import Machine

MIB = 1 << 20
GIB = 1 << 30
NEEDS = SandboxNeeds(reserve_bytes=256 * MIB, max_sandboxes=8, concurrent_starts=2)
HERE = Machine(8 * GIB, 4 * GIB, num_cpus=2, num_running=1)
NOW = 1000.0


def sandbox(**facts: object) -> SandboxRecord:
    told = {"name": "a", "sandbox": "w", "owner": "1:1", "opened_at": 900.0, "ready_at": 900.0}
    return SandboxRecord(**{**told, "reserve_bytes": 256 * MIB, **facts})


def obstacle(
    *sandboxes: SandboxRecord, here: Machine = HERE, needs: SandboxNeeds = NEEDS, waited_s=0.0
) -> str:
    return decide(needs, here, sandboxes, NOW).obstacle(waited_s)


def test_an_empty_machine_has_capacity() -> None:
    assert obstacle() == ""


def test_what_young_sandboxes_are_expected_to_use_is_taken() -> None:
    tight = replace(HERE, available_bytes=int(0.8 * GIB) + 500 * MIB)  # a tenth stays free
    young, old = sandbox(ready_at=NOW - SETTLE_S + 1), sandbox(ready_at=NOW - SETTLE_S - 1)
    assert obstacle(here=tight) == ""
    assert obstacle(old, old, here=tight) == ""
    assert "needs 256 MiB" in obstacle(young, here=tight)
    assert "needs 256 MiB" in obstacle(sandbox(ready_at=None), here=tight)
    assert obstacle(replace(young, is_orphan=True), here=tight) == ""


def test_what_a_sandbox_uses_is_read_from_its_cgroup(tmp_path: Path) -> None:
    tight = replace(HERE, available_bytes=int(0.8 * GIB) + 500 * MIB)
    used = tmp_path / "memory.current"
    grows = sandbox(left={"cgroup": (str(tmp_path),)})
    used.write_text(f"{10 * MIB}\n")
    assert "needs 256 MiB" in obstacle(grows, here=tight)  # 246 MiB to come, however old it is
    used.write_text(f"{200 * MIB}\n")
    assert obstacle(grows, here=tight) == ""
    used.write_text(f"{2000 * MIB}\n")
    assert decide(NEEDS, HERE, [grows], NOW).held_bytes == 0


def test_a_gigabyte_at_most_stays_free() -> None:
    assert decide(NEEDS, Machine(64 * GIB, 64 * GIB, 8, 0), [], NOW).kept_bytes == GIB


def test_so_many_sandboxes_and_starts() -> None:
    assert obstacle(*[sandbox()] * 7) == ""
    assert "there are 8 sandboxes, of at most 8" in obstacle(*[sandbox()] * 8)
    assert "2 sandboxes are starting" in obstacle(*[sandbox(ready_at=None)] * 2)


def test_a_busy_machine_delays_a_sandbox_and_does_not_refuse_it() -> None:
    busy = replace(HERE, num_running=17)
    assert "17 threads are ready to run on 2 CPUs" in obstacle(sandbox(), here=busy)
    assert obstacle(sandbox(), here=busy, waited_s=BUSY_WAIT_S) == ""
    assert obstacle(here=busy) == ""  # no box of ours would be the reason


def test_what_never_fits() -> None:
    big = replace(NEEDS, reserve_bytes=int(7.5 * GIB))
    assert decide(big, HERE, [], NOW).never_fits
    assert not decide(NEEDS, replace(HERE, available_bytes=0), [], NOW).never_fits


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 GiB, 6 of them available."""
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_MOUNT", tmp_path / "cgroup")
    written = {"proc/meminfo": f"MemTotal: {8 << 20} kB\nMemAvailable: {6 << 20} kB\n"}
    written["proc/stat"] = "cpu 1\nprocs_running 5\n"
    write(tmp_path, written)
    return tmp_path


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}")


def test_a_machine_without_cgroups(fake: Path) -> None:
    found = machine.look()
    assert (found.memory_bytes, found.available_bytes) == (8 * GIB, 6 * GIB)
    assert (found.num_running, found.held_by) == (5, "")


@pytest.mark.parametrize("at", ["", "job/"])
def test_a_cgroup_of_version_2_that_is_tighter(fake: Path, at: str) -> None:
    files = {
        "proc/self/cgroup": "0::/job/run\n",
        "cgroup/job/run/cgroup.procs": "1",
        "cgroup/job/run/memory.max": "max\n",
        "cgroup/job/run/memory.current": GIB,
        f"cgroup/{at}memory.max": 4 * GIB,
        f"cgroup/{at}memory.current": 3 * GIB,
        f"cgroup/{at}memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "cgroup/job/run/cpu.max": "150000 100000\n",
    }
    write(fake, files)
    found = machine.look()
    assert (found.memory_bytes, found.available_bytes) == (4 * GIB, 2 * GIB)
    assert found.held_by == str(fake / "cgroup" / at).rstrip("/")
    assert found.num_cpus <= 1.5


def test_a_cgroup_of_version_1_that_is_tighter(fake: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/\n",
        "cgroup/memory/a/b/cgroup.procs": "1",
        "cgroup/memory/a/b/memory.limit_in_bytes": 9223372036854771712,
        "cgroup/memory/a/b/memory.usage_in_bytes": GIB,
        "cgroup/memory/a/memory.limit_in_bytes": 2 * GIB,
        "cgroup/memory/a/memory.usage_in_bytes": GIB,
        "cgroup/memory/a/memory.stat": "cache 5\ntotal_inactive_file 1024\n",
        "cgroup/cpu,cpuacct/a/cgroup.procs": "1",
        "cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 50000,
        "cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
    }
    write(fake, files)
    found = machine.look()
    assert (found.memory_bytes, found.available_bytes) == (2 * GIB, GIB + 1024)
    assert (found.num_cpus, found.held_by) == (0.5, str(fake / "cgroup/memory/a"))


def test_a_container_whose_cgroup_path_is_that_of_the_host(fake: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123\n",
        "cgroup/memory/cgroup.procs": "1",
        "cgroup/memory/memory.limit_in_bytes": 3 * GIB,
        "cgroup/memory/memory.usage_in_bytes": GIB,
    }
    write(fake, files)
    assert machine.look().available_bytes == 2 * GIB
