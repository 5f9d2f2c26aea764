"""What every box does, whatever its wall: commands, files, snapshots, tunnels, and its end."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.pace import wait_until
from support.processes import wait_gone
from support.sandbox_types import EACH_SANDBOX_TYPE, IMAGE, MAKERS, MIB, missing, opened

from rollart_bench import sandbox
from rollart_core.errors import ConfigError, SandboxFailure
from rollart_sandboxes import connection
from rollart_sandboxes.process import ProcessSandbox


@pytest.fixture(params=EACH_SANDBOX_TYPE)
def isolation(request) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


def sh(text: str) -> list[str]:
    return ["/bin/sh", "-c", text]


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, which nobody else uses."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_many_calls_at_once_do_not_wait_for_each_other(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            slow = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout_s=1000))
            many = await asyncio.gather(
                *(sandbox.exec(["echo", str(i)], timeout_s=30) for i in range(24))
            )
            assert [r.stdout for r in many] == [b"%d\n" % i for i in range(24)]
            assert not slow.done()
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow

    asyncio.run(main())


def test_what_a_command_is_given_and_gives(isolation) -> None:
    async def main() -> None:
        async with opened(isolation, env={"A": "1"}) as sandbox:
            result = await sandbox.exec(
                sh('pwd; echo "$A$B"; cat; echo bad >&2; exit 3'),
                timeout_s=30,
                cwd=(await folder(sandbox, "there")),
                env={"B": "2"},
                stdin=b"in" * 100_000,
            )
            assert result.exit_code == 3
            assert result.stdout == f"{sandbox.root}/there\n12\n".encode() + b"in" * 100_000
            assert (result.stderr, result.timed_out, result.truncated) == (b"bad\n", False, False)
            assert (await sandbox.exec(sh("kill -TERM $$"), timeout_s=30)).exit_code == 143
            assert (await sandbox.exec(["/etc/passwd"], timeout_s=30)).exit_code == 126
            missing = await sandbox.exec(["no-such"], timeout_s=30)
            assert (missing.exit_code, missing.stdout) == (127, b"")
            assert b"no-such" in missing.stderr
            with pytest.raises(NotADirectoryError):
                await sandbox.exec(["true"], timeout_s=30, cwd="nowhere")

    asyncio.run(main())


async def folder(sandbox, name: str) -> str:
    await sandbox.write_file(f"{name}/.keep", b"")
    return name


def test_a_timeout_kills_all_that_the_command_started(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            command = "sleep 1000 & setsid sleep 1000 & (setsid -f sleep 1000); sleep 1000"
            result = await sandbox.exec(sh(command), timeout_s=0.3)
            assert (result.timed_out, result.exit_code) == (True, 137)
            await nothing_sleeps(sandbox)

    asyncio.run(main())


def test_a_child_does_not_outlive_its_command(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            until = "touch begun; while [ ! -e go ]; do sleep 0.01; done; echo done"
            other = asyncio.create_task(sandbox.exec(sh(until), timeout_s=60))
            while (await sandbox.exec(["test", "-e", "begun"], timeout_s=30)).exit_code:
                pass
            command = "setsid -f sleep 1000; env -i setsid -f sleep 1000; sleep 1000 & echo ok"
            result = await sandbox.exec(sh(command), timeout_s=30)
            assert (result.exit_code, result.stdout) == (0, b"ok\n")
            await sandbox.write_file("go", b"")
            assert (await other).stdout == b"done\n"
            await nothing_sleeps(sandbox)

    asyncio.run(main())


async def nothing_sleeps(sandbox) -> None:
    """Wait until no ``sleep 1000`` below the agent is alive; the test's timeout ends the wait."""
    while sleepers(sandbox.agent_pid):
        await asyncio.sleep(0.02)


def sleepers(agent_pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z" or int(fields[1]) == agent_pid:
                parents[int(entry.name)] = int(fields[1])

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == agent_pid:
                return True
        return False

    return [pid for pid in parents if below(pid)]


def test_cancelling_ends_the_command_in_the_sandbox(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            running = asyncio.create_task(
                sandbox.exec(sh("touch begun; exec sleep 1000"), timeout_s=1000)
            )
            while (await sandbox.exec(["test", "-e", "begun"], timeout_s=30)).exit_code:
                pass
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await nothing_sleeps(sandbox)

    asyncio.run(main())


def test_much_output_is_cut_in_the_middle(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            command = "echo first; head -c 60000000 /dev/zero; echo last"
            result = await sandbox.exec(sh(command), timeout_s=60, max_output_bytes=1000)
            assert result.truncated
            assert len(result.stdout) == 1000
            assert result.stdout.startswith(b"first\n")
            assert result.stdout.endswith(b"last\n")
            assert (result.stdout_cut, result.stderr_cut) == (500, None)
            exact = await sandbox.exec(["echo", "x" * 9], timeout_s=30, max_output_bytes=10)
            assert (exact.truncated, exact.stdout) == (False, b"x" * 9 + b"\n")
            assert exact.stdout_cut is None
            none = await sandbox.exec(["echo", "x"], timeout_s=30, max_output_bytes=0)
            assert (none.truncated, none.stdout) == (True, b"")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["a b", "new\nline", "ünï", "-rf", "a/./c", "'\"$(x)`"])
def test_files_of_odd_names(isolation, name) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            content = os.urandom(700_000)
            await sandbox.write_file(name, content, mode=0o751)
            assert await sandbox.read_file(name) == content
            result = await sandbox.exec(["stat", "-c", "%a %s", "--", name], timeout_s=30)
            assert result.stdout == b"751 700000\n"
            await sandbox.write_file(name, b"")
            assert await sandbox.read_file(name) == b""
            assert len((await sandbox.exec(["ls", "-A"], timeout_s=30)).stdout.splitlines()) <= 2

    asyncio.run(main())


def test_files_that_cannot_be_had(isolation) -> None:
    async def main() -> None:
        async with opened(isolation, file_bytes=MIB) as sandbox:
            await sandbox.exec(
                sh("mkdir d; mkfifo f; head -c 2000000 /dev/zero > big"), timeout_s=30
            )
            for path in ("no/such", "d", "f", "big", "/proc/self/mem"):
                with pytest.raises(OSError, match=r"\w"):
                    await sandbox.read_file(path)
            with pytest.raises(OSError, match=r"\w"):
                await sandbox.write_file("d", b"")
            assert (await sandbox.exec(["ls", "-A"], timeout_s=30)).stdout == b"big\nd\nf\n"

    asyncio.run(main())


def test_a_file_with_more_in_it_than_its_size_says_is_refused(isolation) -> None:
    async def main() -> None:
        async with opened(isolation, file_bytes=100) as sandbox:
            with pytest.raises(OSError, match=r"larger than 100 bytes|outside the sandbox"):
                await sandbox.read_file("/proc/cpuinfo")
            await sandbox.write_file("kept", b"x" * 100)
            assert await sandbox.read_file("kept") == b"x" * 100

    asyncio.run(main())


def test_what_no_system_call_takes_is_refused(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            told: list[tuple[list[str], dict[str, object]]] = [
                (["echo", "a\0b"], {}),
                (["a\0b"], {}),
                (["true"], {"env": {"A": "\0"}}),
                (["true"], {"env": {"A=B": "x"}}),
                (["true"], {"cwd": "a\0b"}),
            ]
            for argv, more in told:
                with pytest.raises(OSError, match=r"null byte|NUL|illegal") as raised:
                    await sandbox.exec(argv, timeout_s=30, **more)
                assert raised.value.errno == errno.EINVAL
            with pytest.raises(OSError, match="NUL"):
                await sandbox.read_file("a\0b")
            with pytest.raises(OSError, match="null byte"):
                await sandbox.program(["\0"], take=print, begun=lambda write: None, timeout_s=30)
            assert (await sandbox.exec(["true"], timeout_s=30)).exit_code == 0

    asyncio.run(main())


def test_a_snapshot_brings_everything_back(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            show = sh("find . -printf '%P %y %m %s %l\\n' | sort; cat a/x; ls -A /tmp/t 2>&1")
            made = "mkdir -p a/shut; echo 1 > a/x; ln a/x a/y; ln -s /etc/passwd link; "
            made += "echo s > a/shut/in; chmod 000 a/shut/in; chmod 500 a/shut; mkfifo p"
            await sandbox.exec(sh(made), timeout_s=30)
            before = await sandbox.exec(show, timeout_s=30)
            first = await sandbox.snapshot()
            await sandbox.exec(sh("chmod 700 a/shut; rm -rf a link; mkdir b"), timeout_s=30)
            second = await sandbox.snapshot()
            await sandbox.restore(first)
            assert (await sandbox.exec(show, timeout_s=30)).stdout == before.stdout
            assert (await sandbox.exec(sh("test a/x -ef a/y"), timeout_s=30)).exit_code == 0
            await sandbox.restore(second)
            assert (await sandbox.exec(["ls", "-A"], timeout_s=30)).stdout == b"b\np\n"
            with pytest.raises(LookupError, match="snapshot-0"):
                await sandbox.restore("../x")

    asyncio.run(main())


def test_forward_leads_to_a_server_of_the_host(isolation) -> None:
    client = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
sent = b'x' * 3000000
import threading
t = threading.Thread(target=lambda: (s.sendall(sent), s.shutdown(socket.SHUT_WR))); t.start()
got = b''
while True:
    data = s.recv(65536)
    if not data: break
    got += data
t.join()
print(len(got), got == sent)
"""

    async def echo(reader, writer) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, opened(isolation) as sandbox:
            await sandbox.forward("sockets/api", f"127.0.0.1:{port}")
            run = ["/usr/bin/python3", "-c", client, "sockets/api"]
            results = await asyncio.gather(*(sandbox.exec(run, timeout_s=60) for _ in range(2)))
            assert [r.stdout for r in results] == [b"3000000 True\n"] * 2
            with pytest.raises(ValueError, match="host:port"):
                await sandbox.forward("other", "nowhere")
            with pytest.raises(OSError, match=r"in use"):
                await sandbox.forward("sockets/api", f"127.0.0.1:{port}")

    asyncio.run(main())


def test_an_agent_that_dies_is_a_typed_failure_and_leaves_nothing(isolation, scratch) -> None:
    async def main() -> None:
        sandbox = MAKERS[isolation]()
        await sandbox.start()
        running = asyncio.create_task(sandbox.exec(sh("echo $$ > pid; sleep 1000"), timeout_s=1000))
        while (await sandbox.exec(["test", "-s", "pid"], timeout_s=30)).exit_code:
            pass
        os.kill(sandbox.agent_pid, signal.SIGKILL)
        with pytest.raises(SandboxFailure, match="the sandbox is gone"):
            await running
        with pytest.raises(SandboxFailure, match="the sandbox is gone"):
            await sandbox.read_file("pid")
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(RuntimeError, match="not up"):
            await sandbox.exec(["true"], timeout_s=1)

    asyncio.run(main())
    assert list(scratch.iterdir()) == []


def test_a_sandbox_ends_when_its_time_is_over(isolation, scratch) -> None:
    async def main() -> None:
        async with opened(isolation, ttl_s=0.5) as sandbox:
            with pytest.raises(SandboxFailure, match="the sandbox is gone"):
                await sandbox.exec(["sleep", "1000"], timeout_s=1000)

    asyncio.run(main())
    assert list(scratch.iterdir()) == []


def test_process_has_to_be_trusted() -> None:
    with pytest.raises(ConfigError, match="trusted: true"):
        ProcessSandbox()


@pytest.mark.parametrize("path", ["../out", "/etc/hostname", "link/x", "link", "a/../../out"])
def test_file_transfer_stays_in_the_folder_of_a_process_sandbox(tmp_path, path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("kept")

    async def main() -> None:
        async with opened("process") as sandbox:
            os.symlink(outside, Path(sandbox.root, "link"))
            with pytest.raises(PermissionError, match="outside the sandbox"):
                await sandbox.read_file(path)
            with pytest.raises(PermissionError, match="outside the sandbox"):
                await sandbox.write_file(path, b"spoilt")
            assert stat.S_IMODE(os.stat(sandbox.root).st_mode) == 0o700

    asyncio.run(main())
    assert [p.name for p in outside.iterdir()] == ["x"]
    assert (outside / "x").read_text() == "kept"


def test_a_sandbox_whose_python_is_of_another_kind_compiles_the_agent(
    isolation, monkeypatch
) -> None:
    monkeypatch.setattr(connection, "MAGIC_NUMBER", b"none")
    connection.bootstrap.cache_clear()

    async def main() -> None:
        async with opened(isolation) as sandbox:
            assert (await sandbox.exec(["echo", "ok"], timeout_s=30)).stdout == b"ok\n"

    try:
        asyncio.run(main())
    finally:
        connection.bootstrap.cache_clear()


def test_the_agent_needs_no_syntax_newer_than_python_3_8() -> None:
    for text in connection.sources().values():
        ast.parse(text, feature_version=(3, 8))


def test_a_process_sandbox_ends_with_its_host() -> None:
    code = """
import asyncio
from rollart_sandboxes.process import ProcessSandbox
async def main():
    box = ProcessSandbox(trusted=True)
    await box.start()
    asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
    await asyncio.sleep(0)  # the agent takes calls in their order
    await box.exec(["true"], timeout_s=30)
    print(box.agent_pid, box.root, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        agent, root = host.stdout.readline().split()
        (sleeper,) = sleepers(int(agent))
        assert Path(root).is_dir()
    finally:
        host.kill()
        host.communicate()
    wait_gone(sleeper)
    wait_until(lambda: not Path(root).exists(), "the end of its folder")


def test_bench_sandbox(capsys, monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    few = {"sandboxes": 2, "execs": 2, "resets": 2, "starts": 2, "held": 2}
    result = sandbox.run({"sandbox": "process,docker", **few})
    rows, skipped = result["rows"], result["skipped_cases"]
    assert [row["case"] for row in rows[:2]] == ["process: start, p50", "process: start, p95"]
    assert list(skipped) == ["docker", "docker exec"]
    assert all("no Docker engine answers" in why for why in skipped.values())
    assert all(row["ours"] > 0 for row in rows)
    (reset,) = [row for row in rows if "resets of 2000 files" in row["case"]]
    assert reset["ratio"]["min"] > 0
    (held,) = [row for row in rows if "sandboxes held at once" in row["case"]]
    assert held["ours"] == 2


@pytest.mark.docker
def test_bench_sandbox_beside_docker_exec(capsys) -> None:
    if why := missing("docker"):
        pytest.skip(why)
    few = {"sandboxes": 2, "execs": 2, "resets": 2, "starts": 2, "held": 2}
    rows = sandbox.run({"sandbox": "docker", "image": IMAGE, **few})["rows"]
    peers = [row for row in rows if "beside docker exec" in row["case"]]
    assert peers
    assert all(row["mark"] == 10 and row["ratio"]["median"] > 1 for row in peers)
