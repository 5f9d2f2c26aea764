"""Processes that are forked in tests are as those that are started outside of tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support import fork_server
from support.pace import scaled, wait_until

from rollart_core.runtime.process import PART_VARIABLE, WorkerProcess

PART = "support.forked_programs:Part"

if not fork_server.possible():
    pytest.skip("processes are not forked here", allow_module_level=True)


def server_pid() -> int:
    fork_server._starter.client()
    return fork_server._starter.pid


def with_part(
    ask: Callable[[WorkerProcess], Coroutine[Any, Any, Any]],
    log: Path | None = None,
    **options: Any,
) -> Any:
    """Return what is answered by a part that is ended afterwards."""

    async def main() -> Any:
        part = WorkerProcess("part", log_path=log, **options)
        await part.start(PART)
        try:
            return await ask(part)
        finally:
            await part.close()

    return asyncio.run(main())


def program(name: str, *argv: str) -> Any:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    target = f"support.forked_programs:{name}"
    return fork_server.start_program(*argv, target=target, environment=environment)


def ended(pid: int) -> Callable[[], bool]:
    """Return what waits for the end of a process that may be somebody else's child."""
    descriptor = os.pidfd_open(pid)

    def wait() -> bool:
        try:
            return bool(select.select([descriptor], [], [], scaled(30))[0])
        finally:
            os.close(descriptor)

    return wait


def test_a_forked_part_is_as_one_that_is_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLART_NEW", "here")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    other = program("owns_a_part")  # none of whose files are shared
    other.stdout.readline()
    found = []
    for name in ("forked", "normal"):
        with fork_server.normally() if name == "normal" else contextlib.nullcontext():
            options = {"num_threads": 2, "environment": {"ROLLART_MORE": "too"}}
            found.append(with_part(lambda part: part.call("describe"), tmp_path / "log", **options))
            parent = with_part(lambda part: part.call("parent"))
            assert parent == (os.getpid() if name == "normal" else server_pid())
    other.kill()
    other.communicate()
    forked, normal = found
    marks = {part["environment"].pop(PART_VARIABLE) for part in found}
    assert len(marks) == 2
    assert forked == normal
    assert forked["environment"]["ROLLART_NEW"] == "here"
    assert forked["num_threads"] == 2


def test_forked_processes_draw_other_numbers() -> None:
    drawn = [with_part(lambda part: part.call("draw")) for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_streams_go_where_the_client_says(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with_part(lambda part: part.call("say", "logged"), tmp_path / "part.log")
    assert (tmp_path / "part.log").read_text().splitlines() == ["logged"] * 2
    with_part(lambda part: part.call("say", "inherited"))
    assert capfd.readouterr() == ("inherited\n", "inherited\n")


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("0", 0, ""),
        ("3", 3, ""),
        ("null", 0, ""),
        ('"why"', 1, "why\n"),
        ("raises", 1, "ValueError: trouble\n"),
        ("killed", -signal.SIGKILL, ""),
    ],
)
def test_exit_codes_are_those_of_a_process(how: str, code: int, said: str) -> None:
    process = program("ends", how)
    out, err = process.communicate()
    assert (out, process.returncode, process.poll(), process.wait(0)) == ("out\n", code, code, code)
    assert err.endswith(said) if said else not err
    process.kill()  # of what has ended: nothing
    assert not Path(f"/proc/{process.pid}").exists()


def test_one_that_is_killed_says_by_what() -> None:
    process = program("owns_a_part")
    pid = int(process.stdout.readline())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    part_ended = ended(pid)
    process.terminate()
    process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert part_ended(), "the part outlived its owner"


def test_a_handle_that_is_dropped_warns_and_ends_the_process() -> None:
    process = program("owns_a_part")
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    its_end = ended(process.pid)
    with pytest.warns(ResourceWarning, match="is still running"):
        del process
    assert its_end()


def test_nothing_is_left_open_or_unreaped() -> None:
    def held(pid: int) -> set[str]:
        return set(os.listdir(f"/proc/{pid}/fd"))

    program("ends", "0").communicate()
    ours = held(os.getpid())
    for _ in range(5):
        with_part(lambda part: part.call("parent"))
        program("ends", "0").communicate()
    assert held(os.getpid()) == ours
    # Its streams, and where it is asked. It closes a connection after it has said how it ended.
    wait_until(lambda: len(held(server_pid())) == 4, "the server has closed its files")
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    assert not [s for s in stats if s.rpartition(")")[2].split()[1] == str(server_pid())]


def test_the_server_has_one_thread() -> None:
    with_part(lambda part: part.call("parent"))
    assert len(os.listdir(f"/proc/{server_pid()}/task")) == 1


def test_a_server_with_threads_refuses_to_fork(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        path = os.pathsep.join(sys.path)
        code = "from support import forked_programs; forked_programs.serves_with_threads()"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            env={**os.environ, "PYTHONPATH": path},
        ):
            listener.close()
            client = fork_server.Client(str(tmp_path / "socket"))
            request = fork_server.Request("sys:exit", [], {}, "/")
            with pytest.raises(RuntimeError, match="the fork server has 2 threads"):
                client.fork(request, 1, 2)


def test_no_program_outlives_a_server_that_is_killed() -> None:
    program_of_tests = """
import os, signal, sys
from support import fork_server
fork_server.PRELOADED = ()
fork_server.install()
program = fork_server.start_program(target="support.forked_programs:waits")
print(program.stdout.readline(), end="", flush=True)
sys.stdin.readline()
os.kill(fork_server._starter.pid, signal.SIGKILL)
assert program.wait() == -signal.SIGKILL
os._exit(0)
"""
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", program_of_tests],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as tests:
        assert tests.stdin is not None
        assert tests.stdout is not None
        pid = int(tests.stdout.readline())
        its_end = ended(pid)
        tests.stdin.close()
        has_ended = its_end()
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        assert has_ended, "the program outlived the server"
    assert tests.returncode == 0


def test_the_server_ends_with_the_tests_and_its_processes_with_it() -> None:
    program_of_tests = f"""
import asyncio, sys
from support import fork_server
fork_server.PRELOADED = ()
fork_server.install()
from rollart_core.runtime.process import WorkerProcess
async def main():
    part = WorkerProcess("part")
    await part.start({PART!r})
    print(fork_server._starter.pid, part.pid, flush=True)
    await part.call("wait")
asyncio.run(main())
"""
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", program_of_tests],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as tests:
        assert tests.stdout is not None
        ends = [ended(int(pid)) for pid in tests.stdout.readline().split()]
        tests.kill()
        assert len(ends) == 2
        assert all(end() for end in ends)
