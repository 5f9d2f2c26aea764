"""What code in a box tries against the host, the other boxes and the agent: in vain.

In each wall that holds something: beside the process sandbox, these would do what they try.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cgroups import cgroups_of
from support.processes import is_running, wait_gone
from support.sandbox_types import HELD, MIB, missing, opened

from rollart_core.errors import SandboxFailure
from rollart_sandboxes import bubblewrap


@pytest.fixture(params=HELD)
def isolation(request) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


@pytest.fixture
def _needs_bubblewrap() -> None:
    if why := missing("bubblewrap"):
        pytest.skip(why)


def in_sandbox(isolation: str, command: str, *, timeout_s: float = 30.0, **options: object):
    """Return what a shell command gave in a box that answers afterwards too."""

    async def main():
        async with opened(isolation, **options) as sandbox:
            result = await sandbox.exec(["/bin/sh", "-c", command], timeout_s=timeout_s)
            after = await sandbox.exec(["echo", "still here"], timeout_s=30)
            assert after.stdout == b"still here\n"
            return result

    return asyncio.run(main())


def python_in_sandbox(isolation: str, code: str, **options: object):
    quoted = "'" + code.replace("'", "'\\''") + "'"
    return in_sandbox(isolation, f"/usr/bin/python3 -c {quoted}", **options)


def test_no_network(isolation) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        async with server, opened(isolation) as sandbox:
            result = await sandbox.exec(["/usr/bin/python3", "-c", code], timeout_s=30)
            assert b"ConnectionRefusedError" in result.stderr
            links = await sandbox.exec(["cat", "/proc/net/dev"], timeout_s=30)
            names = [line.split(b":")[0].strip() for line in links.stdout.splitlines()[2:]]
            assert names == [b"lo"]

    asyncio.run(main())


def test_files_of_the_host_are_neither_seen_nor_written(isolation, tmp_path) -> None:
    (tmp_path / "secret").write_text("secret")
    of_the_host = "ls /root /home /var /run /sys" if isolation == "bubblewrap" else "ls /root"
    result = in_sandbox(isolation, f"cat {tmp_path}/secret /etc/shadow; {of_the_host}; ls /tmp/*")
    assert result.stdout == b""
    tries = "for p in /x /usr/x /etc/x /dev/x /proc/x /usr/bin/env; do echo spoilt > $p; done"
    written = in_sandbox(isolation, tries)
    assert written.stderr.count(b"cannot create") == 6
    assert not Path("/usr/x").exists()


@pytest.mark.usefixtures("_needs_bubblewrap")
def test_a_sandbox_that_is_root_on_no_host_and_can_gain_nothing() -> None:
    result = in_sandbox(
        "bubblewrap",
        "id -u; grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status; unshare -Ur id",
    )
    lines = result.stdout.decode().split()
    assert lines[0] == "1000"
    assert set(lines[2:7:2]) == {"0000000000000000"}
    assert "NoNewPrivs:" in lines
    assert lines[lines.index("NoNewPrivs:") + 1] == "1"
    if os.geteuid() == 0:

        async def owner() -> int:
            async with opened("bubblewrap") as sandbox:
                status = Path(f"/proc/{sandbox.agent_pid}/status").read_text()
                return int(status.split("Uid:")[1].split()[0])

        assert asyncio.run(owner()) == 65534


@pytest.mark.usefixtures("_needs_bubblewrap")
def test_no_user_namespace_in_the_sandbox() -> None:
    result = in_sandbox("bubblewrap", "unshare -Ur id; bwrap --ro-bind / / id")
    assert (result.exit_code != 0, result.stdout) == (True, b"")


@pytest.mark.parametrize(
    ("missing", "said"), [("bwrap", "install the package bubblewrap"), ("setpriv", "util-linux")]
)
@pytest.mark.usefixtures("_needs_bubblewrap")
def test_what_is_missing_is_said_in_one_line(missing, said, monkeypatch) -> None:
    if missing == "setpriv" and os.geteuid() != 0:
        pytest.skip("only root needs setpriv")
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else found(name))
    bubblewrap.launcher.cache_clear()
    try:
        with pytest.raises(SandboxFailure, match=said) as raised:
            in_sandbox("bubblewrap", "true")
        assert not raised.value.retryable
        assert "\n" not in str(raised.value)
    finally:
        bubblewrap.launcher.cache_clear()


@pytest.mark.usefixtures("_needs_bubblewrap")
def test_a_sandbox_that_cannot_be_made_says_why() -> None:
    with pytest.raises(SandboxFailure, match="bwrap: Can't find source path /no-such"):
        in_sandbox("bubblewrap", "true", ro_binds=["/no-such-folder"])
    with pytest.raises(SandboxFailure, match="no-python"):
        in_sandbox("bubblewrap", "true", python="/usr/bin/no-python")


def test_settings_of_the_kernel_cannot_be_written(isolation) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    # The write repeats what is there, so that a hole in the wall would spoil nothing.
    tries = (
        f"printf '%s' '{before.strip()}' > /proc/sys/kernel/core_pattern; "
        "cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness; ls /sys; "
        "mount -t sysfs sys /tmp; mount -t tmpfs t /tmp"
    )
    result = in_sandbox(isolation, tries)
    assert result.stderr.count(b"cannot create") == 2
    assert result.exit_code != 0
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_processes_of_the_host_are_neither_seen_nor_signalled(isolation) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        result = in_sandbox(isolation, f"kill -9 {bystander.pid}; ls -d /proc/[0-9]* | wc -l")
        assert result.stdout.strip() < b"8"
        assert b"No such process" in result.stderr
        in_sandbox(isolation, "kill -9 -1")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()


def test_the_agent_is_neither_killed_nor_read(isolation) -> None:
    tries = "kill -9 1; kill -STOP 1; kill -TERM 1; cat /proc/1/environ /proc/1/mem; ls /proc/1/fd"
    result = in_sandbox(isolation, tries)
    assert result.stderr.count(b"Permission denied") == 3
    assert result.stdout == b""


def test_sandboxes_do_not_see_each_other(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as one, opened(isolation) as two:
            await one.write_file("mine", b"1")
            await one.write_file("/tmp/mine", b"1")
            await one.write_file("/dev/shm/mine", b"1")
            seen = await two.exec(["ls", "-A", "/work", "/tmp", "/dev/shm"], timeout_s=30)
            assert b"mine" not in seen.stdout
            await two.exec(["/bin/sh", "-c", "kill -9 -1"], timeout_s=30)
            assert await one.read_file("mine") == b"1"

    asyncio.run(main())


def test_a_gigabyte_of_output_does_not_stay_in_memory(isolation) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = in_sandbox(
        isolation, "head -c 1000000000 /dev/zero", memory_bytes=128 * MIB, timeout_s=60
    )
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, MIB)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 * 1024  # KiB


def test_a_fork_bomb_is_held(isolation) -> None:
    code = """
import os
most = 0
try:
    while True:
        if os.fork() == 0:
            import time; time.sleep(1000)
        most += 1
except OSError:
    print(most)
"""
    result = python_in_sandbox(isolation, code, num_pids=40)
    assert 10 < int(result.stdout) < 40
    bomb = in_sandbox(isolation, "f() { f | f & }; f; sleep 0.5", num_pids=40, timeout_s=100)
    assert not bomb.timed_out


def test_a_memory_bomb_is_held(isolation) -> None:
    code = "x = []\nwhile True: x.append(b'x' * 1000000)"
    result = python_in_sandbox(isolation, code, memory_bytes=128 * MIB)
    assert result.exit_code in (1, 137)
    assert not result.timed_out


@pytest.mark.usefixtures("_needs_bubblewrap")
def test_a_memory_bomb_is_held_without_a_cgroup() -> None:
    code = "x = []\nwhile True: x.append(b'x' * 1000000)"
    result = python_in_sandbox("bubblewrap", code, memory_bytes=256 * MIB, cgroup=False)
    assert b"MemoryError" in result.stderr


def test_a_disk_bomb_is_held(isolation) -> None:
    tries = "for d in /work /tmp /dev/shm; do head -c 30000000 /dev/zero > $d/big; done"
    result = in_sandbox(
        isolation, tries + "; stat -c %s /*/big /dev/shm/big", disk_bytes=8 * MIB, tmp_bytes=4 * MIB
    )
    assert result.stderr.count(b"No space left") == 3
    assert sorted(map(int, result.stdout.split())) == [4 * MIB, 4 * MIB, 8 * MIB]


def test_a_full_disk_is_an_error_of_the_write(isolation) -> None:
    async def main() -> None:
        async with opened(isolation, disk_bytes=2 * MIB) as sandbox:
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_file("big", bytes(4 * MIB))
            assert (await sandbox.exec(["ls", "-A"], timeout_s=30)).stdout == b""

    asyncio.run(main())


def test_a_snapshot_holds_links_out_of_the_sandbox_as_links(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            command = "ln -s / root; ln -s ../../../etc etc; ln -s root/usr usr"
            await sandbox.exec(["/bin/sh", "-c", command], timeout_s=30)
            with pytest.raises(OSError, match=r"Read-only|Permission"):
                await sandbox.write_file("root/usr/x", b"spoilt")
            await sandbox.restore(await sandbox.snapshot())
            listed = await sandbox.exec(["readlink", "root", "etc", "usr"], timeout_s=30)
            assert listed.stdout == b"/\n../../../etc\nroot/usr\n"

    asyncio.run(main())


@pytest.mark.usefixtures("_needs_bubblewrap")
def test_no_process_of_a_sandbox_is_left_when_its_host_dies() -> None:
    code = """
import asyncio, sys
from rollart_sandboxes.bubblewrap import BubblewrapSandbox
async def main():
    box = BubblewrapSandbox()
    await box.start()
    asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
    await asyncio.sleep(0)  # the agent takes calls in their order
    await box.exec(["true"], timeout_s=30)
    print(box.agent_pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    agent = int(host.stdout.readline())
    assert is_running(agent)
    host.send_signal(signal.SIGKILL)
    host.communicate()
    wait_gone(agent)
    in_sandbox("bubblewrap", "true")  # the next box tidies up after the host that could not
    groups = cgroups_of(host.pid)
    assert groups == []
