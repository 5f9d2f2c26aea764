"""What code in a bubblewrap box cannot ask of the kernel, and that ordinary programs run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
from types import SimpleNamespace

import pytest
from support.sandbox_types import missing, opened

from rollart_core.errors import SandboxFailure
from rollart_sandboxes import bubblewrap, seccomp

pytestmark = [
    pytest.mark.skipif(bool(missing("bubblewrap")), reason=missing("bubblewrap")),
]
_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers and code are of x86_64")

_CALLS = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, args in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    gave = libc.syscall(*map(ctypes.c_long, args))
    found[name] = ctypes.get_errno() if gave == -1 else 0
print(json.dumps(found))
"""


def run(argv: list[str], **options: object) -> SimpleNamespace:
    """Return what a program in a box gave."""

    async def main() -> SimpleNamespace:
        async with opened("bubblewrap", **options) as sandbox:
            result = await sandbox.exec(argv, timeout_s=120)
            said = SimpleNamespace(code=result.exit_code, out=result.stdout.decode())
            said.err = result.stderr.decode()
            return said

    return asyncio.run(main())


def errors_of(calls: dict[str, list[int]]) -> dict[str, int]:
    """Return the error number of each system call in a box; 0: it was taken."""
    said = run(["/usr/bin/python3", "-c", _CALLS, json.dumps(calls)])
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_each_refused_call_is_refused() -> None:
    refused = seccomp._ABIS[platform.machine()].refused
    # Arguments of 0 do no harm where a call is taken after all.
    found = errors_of({name: [number, 0, 0, 0, 0, 0, 0] for name, number in refused.items()})
    assert {name for name, code in found.items() if code != errno.EPERM} == set()
    assert len(found) >= 50


@_X86
def test_arguments_that_are_refused_and_those_that_are_not() -> None:
    stream, x32 = 1, 0x40000000
    forbidden = {
        "vsock": [41, 40, stream, 0],
        "alg": [41, 38, 5, 0],
        "packet": [41, 17, 3, 0],
        "bluetooth": [41, 31, 3, 0],
        "vsock pair": [53, 40, stream, 0, 0],
        "new user namespace": [56, 0x10000000 | 17, 0, 0, 0, 0],
        "new network namespace": [56, 0x40000000 | 17, 0, 0, 0, 0],
        "no address randomisation": [135, 0x0040000],
        "typing into a terminal": [16, 0, 0x5412, 0],
    }
    unknown = {
        "clone3": [435, 0, 0],
        "a call of the future": [600],
        "getpid of x32": [x32 | 39],
        "clone of x32": [x32 | 56, 0x10000000, 0, 0, 0, 0],
    }
    allowed = {
        "unix": [41, 1, stream, 0],
        "ip": [41, 2, stream, 0],
        "ip version 6": [41, 10, stream, 0],
        "netlink": [41, 16, 3, 0],
        "getpid": [39],
        "present personality": [135, 0xFFFFFFFF],
    }
    found = errors_of({**forbidden, **unknown, **allowed})
    assert {name: found[name] for name in forbidden} == dict.fromkeys(forbidden, errno.EPERM)
    assert {name: found[name] for name in unknown} == dict.fromkeys(unknown, errno.ENOSYS)
    assert {name: found[name] for name in allowed} == dict.fromkeys(allowed, 0)


@_X86
def test_calls_of_the_32_bit_abi_are_refused() -> None:
    getpid = """
import ctypes, mmap
code = bytes.fromhex("b814000000" "cd80" "c3")  # mov eax, 20 (getpid of i386); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    said = run(["/usr/bin/python3", "-c", getpid])
    assert (said.code, int(said.out)) == (0, -errno.ENOSYS)


def test_every_process_of_the_sandbox_is_filtered() -> None:
    said = run(["/bin/sh", "-c", "sh -c 'grep Seccomp: /proc/self/status /proc/1/status'"])
    assert [line.split()[-1] for line in said.out.splitlines()] == ["2", "2"]


def test_ordinary_programs_run() -> None:
    work = """
import concurrent.futures, multiprocessing, os, pty, signal, socket, sqlite3, subprocess, sys
import tempfile, threading, time, asyncio, mmap, select, resource
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, range(-4, 0))) == [4, 3, 2, 1]
with multiprocessing.get_context("spawn").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run(["echo", "a"], capture_output=True, check=True).stdout == b"a\\n"
async def served():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
    child = await asyncio.create_subprocess_exec("true")
    assert await child.wait() == 0
asyncio.run(served())
left, right = socket.socketpair()
left.send(b"x")
assert right.recv(1) == b"x"
master, slave = pty.openpty()
assert os.isatty(slave)
with tempfile.NamedTemporaryFile() as file:
    sqlite3.connect(file.name).execute("create table t (x)")
os.kill(os.getpid(), 0)
time.clock_gettime(time.CLOCK_MONOTONIC)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("done")
"""

    async def main() -> None:
        async with opened("bubblewrap", num_pids=128) as sandbox:
            # A file, for processes that multiprocessing spawns import it.
            guarded = work.replace("\n", "\n    ")
            await sandbox.write_file("work.py", f"if __name__ == '__main__':{guarded}".encode())
            python = await sandbox.exec(["/usr/bin/python3", "work.py"], timeout_s=120)
            assert (python.exit_code, python.stdout) == (0, b"done\n"), python.stderr
            commands = (
                "set -e; git init -q a; cd a; git config user.email a@b; git config user.name a; "
                "echo x > f; git add f; git commit -qm f; git gc -q; git clone -q . ../b; "
                "git -C ../b log --oneline | wc -l; seq 9 | sort -rn | xargs -P 4 -n 1 echo | wc -l"
            )
            git = await sandbox.exec(["/bin/sh", "-c", commands], timeout_s=120)
            assert (git.exit_code, git.stdout.split()) == (0, [b"1", b"9"]), git.stderr

    asyncio.run(main())


def test_pytest_runs_as_before() -> None:
    # The packages of this environment, where the box's Python can import them.
    folder = os.path.dirname(os.path.dirname(pytest.__file__))

    async def main() -> None:
        async with opened("bubblewrap", ro_binds=[folder], env={"PYTHONPATH": folder}) as sandbox:
            await sandbox.write_file(
                "test_a.py", b"def test_a(tmp_path):\n    assert tmp_path.is_dir()\n"
            )
            command = ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            result = await sandbox.exec(command, timeout_s=120)
            assert (result.exit_code, b"1 passed" in result.stdout) == (0, True), result.stdout

    asyncio.run(main())


def test_another_machine_type_is_refused_in_one_line(monkeypatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    bubblewrap.system_calls.cache_clear()
    try:
        with pytest.raises(SandboxFailure, match="riscv64: use the sandbox docker") as raised:
            run(["true"])
        assert not raised.value.retryable
    finally:
        bubblewrap.system_calls.cache_clear()


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_a_filter_is_whole(machine: str) -> None:
    """Every jump lands inside, every path ends in a return, and the kernel's limit is kept."""
    program = seccomp.program(machine)
    assert program is not None
    assert len(program) % 8 == 0
    size = len(program) // 8
    assert size < 4096
    for at in range(size):
        code = int.from_bytes(program[8 * at : 8 * at + 2], "little")
        jumps = program[8 * at + 2 : 8 * at + 4]
        if code & 7 == 5:
            assert all(at + 1 + jump < size for jump in jumps)
    assert int.from_bytes(program[-4:], "little") == 0x7FFF0000
