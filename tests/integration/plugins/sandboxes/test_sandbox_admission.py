from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.pool.admission import Admission, Request
from rollart_sandboxes.pool.gc import collect_garbage
from rollart_sandboxes.pool.live import Line, LiveSandboxes, live_sandboxes, new_record
from rollart_sandboxes.pool.machine import Machine
from rollart_sandboxes.pool.owner import (
    HOST_LABEL,
    is_alive,
    is_left,
    is_orphan,
    labels,
    owner_mark,
    stamp,
)

GIB = 1 << 30
POOL = {"reserve_bytes": GIB, "wait_s": 60, "concurrent_starts": 9}


class FakeMachine:
    """A machine with a tenth of 10 GiB to keep, so that ``free`` is what boxes may have."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> Machine:
        return Machine(10 * GIB, GIB + self.free, num_cpus=2, num_running=0)


async def nothing() -> None:
    """No room can be made."""


def request(**pool: Any) -> Request:
    return Request("no/Wall-v1", PoolOptions(**{**POOL, **pool}), 60.0)


def run(folder: Path, free: int, work: Callable[..., Coroutine[Any, Any, None]]) -> None:
    ledger = LiveSandboxes(folder / "boxes")
    here = FakeMachine(free)
    asyncio.run(work(ledger, Admission(ledger, here), here))


def test_a_sandbox_takes_capacity_and_gives_it_back(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        first = await way.admit(request(), nothing)
        (record,) = await live_sandboxes(ledger)
        assert (record.pid, record.ready_at, record.is_orphan) == (os.getpid(), None, False)
        assert (record.reserve_bytes, record.ttl_s) == (GIB, 60.0)
        assert await way.admit_at_once(request()) is None
        waiting = asyncio.create_task(way.admit(request(), nothing))
        await until(ledger.someone_waits)
        first.close()
        second = await waiting
        assert [r.name for r in await live_sandboxes(ledger)] == [second.path.stem]
        second.close()
        assert (await live_sandboxes(ledger), ledger.someone_waits()) == ([], False)

    run(tmp_path, GIB, work)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)  # the test's timeout ends the wait


def test_no_capacity_is_told_with_its_figures(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        held = await way.admit(request(), nothing)
        for _ in range(2):
            with pytest.raises(SandboxFailure) as caught:
                await way.admit(request(wait_s=0.05), nothing)
            assert caught.value.retryable
            said = str(caught.value)
            assert "no capacity for a sandbox within 0.05 s: it needs 1.0 GiB of memory" in said
            assert "2.0 GiB available of 10.0 GiB" in said
            assert "1.0 GiB are reserved for sandboxes; 1 live sandboxes, 1 of them" in said
            assert "rollart sandbox list" in said
        assert not ledger.someone_waits()
        held.close()

    run(tmp_path, GIB, work)


def test_what_never_fits_fails_at_once_and_for_good(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        with pytest.raises(SandboxFailure, match="never fits this machine") as caught:
            await way.admit(request(reserve_bytes=9.5 * GIB), nothing)
        assert not caught.value.retryable

    run(tmp_path, GIB, work)


def test_nobody_is_overtaken(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        other = Admission(ledger, here)  # as of another process
        got: list[str] = []
        lines: list[Line] = []

        async def want(who: str, on: Admission, size: int) -> None:
            lines.append(await on.admit(request(reserve_bytes=size), nothing))
            got.append(who)

        big = asyncio.create_task(want("big", way, 2 * GIB))
        await until(ledger.someone_waits)
        small = [asyncio.create_task(want("small", other, GIB // 4)) for _ in range(2)]
        assert await other.admit_at_once(request(reserve_bytes=GIB // 4)) is None
        here.free = 4 * GIB
        await asyncio.gather(big, *small)
        assert got == ["big", "small", "small"]
        for line in lines:
            line.close()

    run(tmp_path, GIB, work)


def test_a_waiter_that_is_cancelled_holds_up_nobody(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        first = asyncio.create_task(way.admit(request(), nothing))
        await until(ledger.someone_waits)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not ledger.someone_waits()
        here.free = GIB
        (await way.admit(request(), nothing)).close()

    run(tmp_path, 0, work)


def test_a_waiter_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        queue = tmp_path / "boxes" / "queue"
        queue.mkdir(parents=True)
        (tmp_path / "boxes").chmod(0o700)
        (queue / "00000000000000000001-99-x").touch()  # nobody holds its lock
        waiting = asyncio.create_task(way.admit(request(), nothing))
        await until(ledger.someone_waits)
        here.free = GIB
        (await waiting).close()
        assert list(queue.iterdir()) == []

    run(tmp_path, 0, work)


def test_warm_sandboxes_make_capacity(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        warm = await way.admit(request(), nothing)

        async def reserve() -> None:
            warm.close()

        (await way.admit(request(), reserve)).close()

    run(tmp_path, GIB, work)


def test_the_record_of_a_sandbox_survives_a_crash_in_a_write(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        line = await way.admit(request(), nothing)
        line.leaves("folder", "/tmp/rollart-x")
        line.leaves("folder", "/tmp/rollart-y")
        line.update(ready_at=5.0, no_such_fact=1)
        with line.path.open("a") as file:
            file.write('{"left": ["folder", "/tmp/roll')
        (record,) = await live_sandboxes(ledger)
        assert record.left == {"folder": ("/tmp/rollart-x", "/tmp/rollart-y")}
        assert record.ready_at == 5.0
        line.close()
        line.close()
        line.leaves("folder", "/tmp/rollart-z")  # a box that is slow to close
        assert await live_sandboxes(ledger) == []

    run(tmp_path, GIB, work)


def test_a_ledger_that_is_not_yours_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes").chmod(0o777)

    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        with pytest.raises(SandboxFailure, match=r"not yours alone.*ROLLART_BOXES_DIR") as caught:
            await way.admit(request(), nothing)
        assert not caught.value.retryable

    run(tmp_path, GIB, work)


def test_an_orphan_is_reaped_and_a_live_sandbox_is_not(tmp_path: Path) -> None:
    kept, lost, foreign = (tmp_path / name for name in ("rollart-a", "rollart-b", "mine"))

    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        for folder in (kept, lost, foreign):
            folder.mkdir()
        live = await way.admit(request(), nothing)
        live.leaves("folder", str(kept))
        dead = await way.admit(request(), nothing)
        dead.leaves("folder", str(lost))
        dead.close(is_gone=False)  # what the kernel does for a process that is killed
        states = {r.name: r.is_orphan for r in await live_sandboxes(ledger)}
        assert states == {live.path.stem: False, dead.path.stem: True}
        done = await collect_garbage(ledger)
        assert [text.split()[0] for text in done.removed] == [dead.path.stem]
        assert (kept.exists(), lost.exists(), done.failed) == (True, False, [])
        assert [r.name for r in await live_sandboxes(ledger)] == [live.path.stem]
        live.close()

    run(tmp_path, 4 * GIB, work)


def test_a_reaper_removes_nothing_that_is_not_ours(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()

    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        line = await way.admit(request(), nothing)
        for kind, what in {
            "folder": str(mine),
            "cgroup": "/sys/fs/cgroup/memory",
            "container": "no wall is there to remove it",
        }.items():
            line.leaves(kind, what)
        line.leaves("folder", str(tmp_path / "rollart-x" / ".." / "rollart-mine"))
        line.close(is_gone=False)
        done = await collect_garbage(ledger)
        assert mine.is_dir()
        assert len(done.failed) == 4
        assert "no sandbox 'no/Wall-v1' is installed" in " ".join(done.failed)
        assert [r.is_orphan for r in await live_sandboxes(ledger)] == [True]  # it is tried again

    run(tmp_path, GIB, work)


def test_rubbish_in_the_ledger_is_swept_out(tmp_path: Path) -> None:
    async def work(ledger: LiveSandboxes, way: Admission, here: FakeMachine) -> None:
        await live_sandboxes(ledger)
        (ledger.folder / "x.box").write_bytes(b'\xff\x00{"owner": 3}\n[1]\n{"left": 1}\n')
        assert len((await collect_garbage(ledger)).removed) == 1
        assert await live_sandboxes(ledger) == []

    run(tmp_path, GIB, work)


def test_marks_of_owners() -> None:
    assert is_alive(owner_mark())
    assert not is_alive(f"{os.getpid()}:1")  # another process that had the same number
    assert is_alive("rubbish")
    mine = labels("line")
    assert not is_orphan(mine)
    dead = {**mine, "rollart.owner": f"{os.getpid()}:1"}
    assert is_orphan(dead)
    assert not is_orphan({**dead, HOST_LABEL: "another machine"})
    assert not is_orphan({})


def test_stamps_in_the_names_of_files() -> None:
    mine = f"rollart-snapshots-{stamp()}x_1"
    assert not is_left(mine)
    kind, host, pid, _, rest = mine.split("-", 1)[1].split("-")
    assert is_left("-".join(("rollart", kind, host, pid, "1", rest)))
    assert not is_left("-".join(("rollart", kind, "00000000", pid, "1", rest)))
    assert not is_left("rollart-snapshots-a974e0xm")


def test_a_record_names_its_owner(tmp_path: Path) -> None:
    record = new_record("w", ttl_s=None, reserve_bytes=0)
    assert record.owner == owner_mark()
    assert record.pid == os.getpid()
