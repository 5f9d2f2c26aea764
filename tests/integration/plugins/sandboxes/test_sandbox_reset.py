"""A reset to a snapshot: everything is as it was, whatever was done, and only that is unpacked."""

from __future__ import annotations

import asyncio
import collections
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.sandbox_types import EACH_SANDBOX_TYPE, HELD, MIB, missing, opened

from rollart_sandboxes import base as sandboxes
from rollart_sandboxes.inside.snapshots import Packing, Restoring

MAKE = """
git init -q -b main . && git config user.email a@example.org && git config user.name A
mkdir -p src/deep/er empty shut; echo 'ignored/' > .gitignore
for i in 1 2 3 4; do echo "text $i" > src/f$i; done
echo one > src/deep/er/one; ln src/f1 src/deep/linked; ln -s ../f2 src/deep/link; mkfifo src/pipe
printf '#!/bin/sh\\n' > src/run; chmod 755 src/run; chmod 444 src/f4; echo s > shut/in
git add -A . && git commit -qm first; mkdir -p "$T/kept"; echo t > "$T/kept/t"
truncate -s 3000000 src/holes; echo end >> src/holes; touch -d '2020-01-02 03:04:05.678' src/f2
chmod 000 shut/in; chmod 500 shut
"""
SHOW = """
import hashlib, os
for root in ('.', '/tmp', '/dev/shm'):
    if root != '.' and os.environ['T'] != '/tmp':
        continue
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in [''] + sorted(files) + [f for f in folders if os.path.islink(f)]:
            path = os.path.join(folder, name)
            found = os.lstat(path)
            when = found.st_mtime_ns if found.st_uid == os.getuid() else 0
            what = '%o %d %d' % (found.st_mode, when, found.st_nlink if name else 0)
            if os.path.islink(path):
                what += ' -> ' + os.readlink(path)
            elif os.path.isfile(path):
                os.chmod(path, 0o600)
                with open(path, 'rb') as file:
                    what += ' ' + hashlib.sha256(file.read()).hexdigest()
                os.chmod(path, found.st_mode & 0o7777)
            print(repr(path), what, os.listxattr(path, follow_symlinks=False))
"""
PYTHON = "/usr/bin/python3"
TEMPORARY = {"process": "other", "bubblewrap": "/tmp", "docker": "/tmp"}


@pytest.fixture(params=EACH_SANDBOX_TYPE)
def isolation(request) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


async def shell(sandbox, text: str) -> str:
    result = await sandbox.exec(["/bin/sh", "-c", text], timeout_s=60)
    return (result.stdout + result.stderr).decode()


async def shown(sandbox) -> list[str]:
    """Return all there is of every path; reading it changes its change time."""
    result = await sandbox.exec([PYTHON, "-c", SHOW], timeout_s=60)
    assert (result.exit_code, result.stderr) == (0, b"")
    return result.stdout.decode().splitlines()


@asynccontextmanager
async def repository(isolation: str, **options):
    """Give a box with a repository and its snapshot."""
    async with opened(isolation, env={"T": TEMPORARY[isolation]}, **options) as sandbox:
        assert await shell(sandbox, MAKE) == ""
        yield sandbox, await sandbox.snapshot()


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """How many bytes of archives go into boxes, call by call."""
    counts: list[int] = []
    pieces_of = sandboxes._pieces_of

    async def counted(path, spans):
        counts.append(0)
        async for piece in pieces_of(path, spans):
            counts[-1] += len(piece)
            yield piece

    monkeypatch.setattr(sandboxes, "_pieces_of", counted)
    return counts


ATTACKS = {
    "nothing": "true",
    "a hook": "cd .git/hooks; printf '#!/bin/sh\\necho got' > pre-commit; chmod 755 pre-commit",
    "git's config": "git config core.pager 'sh -c evil'; git config alias.status '!evil'",
    "git's index": "git rm -q --cached src/f3; git update-index --assume-unchanged src/f2",
    "commits": "echo x > src/f3; git commit -qam second; git gc -q 2>/dev/null",
    "ignored files": "mkdir -p ignored/a; echo x > ignored/a/b; echo '*' > .git/info/exclude",
    "a hard link": "ln src/f3 src/other; ln src/f2 $T/f2 2>/dev/null; rm src/deep/linked",
    "a broken hard link": "cp src/f1 t; mv t src/f1",
    "same size, old time": "touch -r src/f2 t; echo 'best 2' > src/f2; touch -r t src/f2; rm t",
    "replaced, old time": "cp -p src/f2 t; echo 'best 2' > t; touch -r src/f2 t; mv t src/f2",
    "a swap": "mv src/f2 t; mv src/f3 src/f2; mv t src/f3",
    "folders swapped": "mv src t; cp -a t src; rm -rf t; mv src/deep/er src/e; mkdir src/deep/er",
    "a symlink for a folder": "mv src $T/src; ln -s $T/src src; echo x > $T/src/f2",
    "a symlink to the host's folder": "rm -rf src; ln -s /usr src",
    "a link for a file": "rm src/f2; ln -s /etc/passwd src/f2",
    "a folder for a file": "rm src/f2; mkdir -p src/f2/a/b; echo x > src/f2/a/b/c; chmod 0 src/f2",
    "a file for a folder": "rm -rf src/deep; echo x > src/deep",
    "permissions": "chmod 777 src/f3 src; chmod 000 src/deep; chmod 700 shut; chmod 4755 src/run",
    "all shut": "chmod -R a-rwx . $T/kept",
    "all gone": "chmod -R u+rwx .; rm -rf * .git .gitignore $T/kept",
    "a shut deep tree": "mkdir -p a/b/c/d; chmod 0 a/b/c/d a/b/c a/b a",
    "odd names": "touch -- -rf 'new\nline' \"$(printf 'bad\\377')\"; mkdir '...'; touch .../x",
    "bytes of a hole": "printf x | dd of=src/holes bs=1 seek=100 conv=notrunc status=none",
    "a write within the tick": "printf x | dd of=src/f3 bs=1 conv=notrunc status=none",
    "times": "touch -d '2001-01-01' src/f3 src .",
    "the top": "chmod 777 .; touch -d '2001-01-01' .",
}
MAPPED = """
import mmap, os
m = mmap.mmap(os.open({path!r}, os.O_RDWR), 0)
before = m[-3:]
m[-3:] = b'XYZ'
"""
PROGRAMS = {
    "a deep tree": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "attributes": "import os\nfor p in ('src', 'src/f3'): os.setxattr(p, 'user.x', b'y')",
    "a mapping": "import mmap, os\nm = mmap.mmap(os.open('src/f3', os.O_RDWR), 0); m[0] = 88",
    "a mapping that was read first": MAPPED.format(path="src/f3"),
    "a mapping of a hard link": MAPPED.format(path="src/deep/linked"),
    "a mapping of a file with holes": MAPPED.format(path="src/holes"),
    "a socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('src/s')",
    "a write by name of a descriptor": "import os\nfd = os.open('src/f3', os.O_RDONLY)\n"
    "open(f'/proc/self/fd/{fd}', 'r+').write('X')",
}


@pytest.mark.parametrize("held", HELD)
def test_whatever_was_done_is_undone(held) -> None:
    if why := missing(held):
        pytest.skip(why)

    async def main() -> None:
        async with repository(held) as (sandbox, snapshot):
            await sandbox.restore(snapshot)
            before = await shown(sandbox)
            await sandbox.restore(snapshot)
            assert await shown(sandbox) == before
            attacks = {name: ["/bin/sh", "-c", attack] for name, attack in ATTACKS.items()}
            attacks |= {name: [PYTHON, "-c", program] for name, program in PROGRAMS.items()}
            for name, attack in attacks.items():
                await sandbox.restore(snapshot)
                told = await sandbox.exec(attack, timeout_s=60)
                assert told.exit_code == 0 or name not in PROGRAMS, told.stderr
                await sandbox.restore(snapshot)
                assert await shown(sandbox) == before, name

    asyncio.run(main())


def test_a_write_within_the_tick_of_the_clock_shows(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for _ in range(30):
        packing = Packing([str(tmp_path)])
        collections.deque(packing, maxlen=0)
        assert packing.folders.clock_moves_on()
        with path.open("r+b") as file:
            file.write(b"new")
        assert Restoring([str(tmp_path)], packing.notes).compare() != []
        path.write_bytes(b"old")


def test_a_page_that_was_read_before_it_was_written_is_brought_back(isolation, sent) -> None:
    """On tmpfs a mapping's page, once read, is written without setting the file's times."""
    program = MAPPED.format(path="data")

    async def main() -> None:
        async with opened(isolation) as sandbox:
            await sandbox.write_file("data", b"A" * 8192)
            await sandbox.exec(["ln", "data", "linked"], timeout_s=30)
            snapshot = await sandbox.snapshot()
            for _ in range(2):  # what was brought back is noted as well
                await sandbox.exec([PYTHON, "-c", program], timeout_s=30)
                assert (await sandbox.read_file("linked")).endswith(b"AXYZ")
                await sandbox.restore(snapshot)
                assert await sandbox.read_file("data") == b"A" * 8192
                assert await shell(sandbox, "test data -ef linked && echo same") == "same\n"
            assert len(sent) == 2
            await sandbox.restore(snapshot)
            assert len(sent) == 2

    asyncio.run(main())


def test_a_link_to_what_was_moved_away_and_written_through_a_mapping_is_brought_back() -> None:
    if why := missing("bubblewrap"):
        pytest.skip(why)
    program = MAPPED.format(path="one/deep/data")

    async def main() -> None:
        async with opened("bubblewrap") as sandbox:
            await sandbox.write_file("one/deep/data", b"A" * 8192)
            await shell(sandbox, "mkdir a b; ln one/deep/data b/linked")
            snapshot = await sandbox.snapshot()
            await sandbox.exec([PYTHON, "-c", program], timeout_s=30)
            assert await shell(sandbox, "mv one/deep a") == ""
            await sandbox.restore(snapshot)
            for path in ("b/linked", "one/deep/data"):
                assert await sandbox.read_file(path) == b"A" * 8192

    asyncio.run(main())


def test_only_what_changed_is_unpacked(isolation, sent) -> None:
    inodes = "find . -type f -exec stat -c '%i %z %n' {} + | sort"

    async def main() -> None:
        async with repository(isolation) as (sandbox, snapshot):
            whole = (sandbox._snapshots / f"{snapshot}.archive").stat().st_size
            assert whole < 200_000  # holes are not packed
            before = await shell(sandbox, inodes)
            await sandbox.restore(snapshot)
            assert sent == []
            await shell(sandbox, "echo x > src/f3; rm src/pipe; touch new")
            await sandbox.restore(snapshot)
            assert len(sent) == 1
            assert 0 < sent[0] < 300
            after = await shell(sandbox, inodes)
            changed = set(before.splitlines()) ^ set(after.splitlines())
            assert {line.split()[-1] for line in changed} == {"./src/f3"}
            await sandbox.restore(snapshot)
            assert len(sent) == 1

    asyncio.run(main())


def test_what_ran_at_the_snapshot_is_not_trusted_to_be_unchanged(isolation, sent) -> None:
    """A mapping made before changes its file without changing the file's times."""
    writer = """
import mmap, os, time
shared = mmap.mmap(os.open('file', os.O_RDWR), 0)
shared[0] = 65
open('ready', 'w').close()
while not os.path.exists('go'): time.sleep(0.001)
shared[0] = 66
open('written', 'w').close()
time.sleep(1000)
"""

    async def main() -> None:
        async with opened(isolation) as sandbox:
            await sandbox.write_file("file", b"?" * 5000)
            task = asyncio.create_task(sandbox.exec([PYTHON, "-c", writer], timeout_s=1000))
            await shell(sandbox, "while [ ! -e ready ]; do :; done")
            snapshot = await sandbox.snapshot()
            await shell(sandbox, "touch go; while [ ! -e written ]; do :; done")
            assert (await sandbox.read_file("file"))[:2] == b"B?"
            await sandbox.restore(snapshot)
            assert (await task).exit_code == 137
            assert (await sandbox.read_file("file"))[:2] == b"A?"
            assert len(sent) == 1
            await sandbox.restore(snapshot)
            assert len(sent) == 1

    asyncio.run(main())


def test_nothing_of_the_old_episode_runs_on(isolation) -> None:
    async def main() -> None:
        async with repository(isolation) as (sandbox, snapshot):
            command = (
                "exec 3>held; setsid sleep 1000 & (setsid -f sleep 1000); echo > up; sleep 1000"
            )
            old = asyncio.create_task(sandbox.exec(["/bin/sh", "-c", command], timeout_s=1000))
            await shell(sandbox, "while [ ! -s up ]; do :; done")
            await sandbox.restore(snapshot)
            assert (await old).exit_code == 137
            agents = Path(f"/proc/{sandbox.agent_pid}/task/{sandbox.agent_pid}/children")
            assert agents.read_text().split() == []
            assert await shell(sandbox, "ls held up 2>&1 | grep -c 'No such'") == "2\n"

    asyncio.run(main())


def test_a_forwarded_socket_lives_as_long_as_it_is_in_the_tree(isolation) -> None:
    connect = (
        "import socket,sys\ns=socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1]); print(s.recv(9))\n"
        "except OSError as e: print(type(e).__name__)"
    )

    async def greet(reader, writer) -> None:
        writer.write(b"hello")
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, opened(isolation) as sandbox:
            await sandbox.forward("kept", target)
            snapshot = await sandbox.snapshot()
            await sandbox.forward("new", target)
            await sandbox.restore(snapshot)
            said = [
                (await sandbox.exec([PYTHON, "-c", connect, name], timeout_s=30)).stdout
                for name in ("kept", "new")
            ]
            assert said == [b"b'hello'\n", b"FileNotFoundError\n"]
            await sandbox.forward("new", target)

    asyncio.run(main())


def test_a_restore_that_finds_no_capacity_tries_in_empty_folders(isolation, monkeypatch) -> None:
    async def main() -> None:
        async with repository(isolation) as (sandbox, snapshot):
            before = await shown(sandbox)
            await sandbox.restore(snapshot)
            call, wholes = sandbox._connection.call, []

            async def failing(op, *args, **more):
                if op == "rewind":
                    wholes.append(more["whole"])
                if op == "restore" and len(wholes) == 1:
                    raise OSError(28, "no space")
                return await call(op, *args, **more)

            monkeypatch.setattr(sandbox._connection, "call", failing)
            await shell(sandbox, "echo x > src/f3")
            restoring = asyncio.create_task(sandbox.restore(snapshot))
            await restoring
            assert wholes == [False, True]
            assert await shown(sandbox) == before

    asyncio.run(main())


def test_no_command_runs_in_a_half_restored_sandbox(isolation, monkeypatch) -> None:
    async def main() -> None:
        async with repository(isolation) as (sandbox, snapshot):
            await shell(sandbox, "echo x > src/f3")
            await sandbox._connection.call("rewind", name=snapshot, whole=False)
            with pytest.raises(OSError, match="being restored"):
                await sandbox.exec(["true"], timeout_s=30)
            await sandbox.restore(snapshot)
            assert await shell(sandbox, "cat src/f3") == "text 3\n"

    asyncio.run(main())


@pytest.mark.parametrize("held", HELD)
def test_a_full_disk_is_brought_back(held) -> None:
    if why := missing(held):
        pytest.skip(why)

    async def main() -> None:
        async with repository(held, disk_bytes=8 * MIB) as (sandbox, snapshot):
            before = await shown(sandbox)
            await sandbox.restore(snapshot)
            await shell(sandbox, "rm -rf src; head -c 99000000 /dev/zero > big; rm -rf .git")
            await sandbox.restore(snapshot)
            assert await shown(sandbox) == before

    asyncio.run(main())


def test_a_reset_of_what_is_unchanged_sends_nothing(isolation, sent) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            many = "mkdir d$i; for j in $(seq 25); do echo $i $j > d$i/f$j; done"
            await shell(sandbox, f"for i in $(seq 40); do {many}; done")
            snapshot = await sandbox.snapshot()
            for _ in range(10):  # about 0.01 s each
                await sandbox.restore(snapshot)
            assert sent == []

    asyncio.run(main())
