"""Pools of real boxes: warm ones, room that processes share, and what a crash leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.pace import scaled, until, wait_until
from support.processes import is_running, wait_gone
from support.sandbox_types import EACH_SANDBOX_TYPE, IN_DOCKER, MIB, missing, no_bubblewrap
from typer.testing import CliRunner

from rollart_core.errors import ConfigError, SandboxFailure
from rollart_core.rollout import loop
from rollart_sandboxes.cli import app
from rollart_sandboxes.pool import source
from rollart_sandboxes.pool.gc import collect_garbage
from rollart_sandboxes.pool.live import (
    FOLDER_VARIABLE,
    LiveSandboxes,
    SandboxRecord,
    live_sandboxes,
)
from rollart_sandboxes.pool.source import SandboxSource, sandbox_source

OPTIONS: dict[str, dict[str, object]] = {
    "bubblewrap": {},
    "process": {"trusted": True},
    "docker": dict(IN_DOCKER),
}
OWNER = """
import os, sys, time
from rollart_core.rollout import loop
from rollart_sandboxes.pool.source import sandbox_source
source = sandbox_source({options}, {pool})
async def work():
    box = await source.take()
    await box.snapshot()
    if {warm}:
        while source_pool().num_warm < {warm}:
            await asyncio.sleep(0.01)
    print(box.agent_pid, flush=True)
import asyncio
from rollart_sandboxes.pool import source as module
def source_pool():
    return next(iter(module._here.pools.values()))
loop.run(work())
{then}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger of the test's own, and temporary files in a folder of its own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "boxes"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(source, "_here", source._Here())
    yield tmp_path / "boxes"
    source.close_all()
    assert records() == []
    assert list(scratch.iterdir()) == []


@pytest.fixture(params=EACH_SANDBOX_TYPE)
def isolation(request: pytest.FixtureRequest) -> dict[str, object]:
    if why := missing(request.param):
        pytest.skip(why)
    return {"id": request.param, **OPTIONS[request.param]}


@pytest.fixture
def bubblewrap() -> dict[str, object]:
    if why := no_bubblewrap():
        pytest.skip(why)
    return {"id": "bubblewrap"}


def records() -> list[SandboxRecord]:
    return asyncio.run(live_sandboxes(LiveSandboxes()))


def pool_of(sandboxes: SandboxSource) -> Any:
    return source._here.pools[source._key(sandboxes)]


def on_sandbox_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    loop.run(main())


def test_no_sandbox_is_given_out_twice(isolation) -> None:
    async def work() -> None:
        sandboxes = sandbox_source(isolation, {"warm": 2})
        seen = set()
        for _ in range(4):
            sandbox = await sandboxes.take()
            ls = await sandbox.exec(["ls", "-A"], timeout_s=30)
            assert ls.stdout == b""
            await sandbox.write_file("mine", b"x")
            assert sandbox not in seen
            seen.add(sandbox)
            await sandboxes.give_back(sandbox)
        await sandboxes.close()

    on_sandbox_loop(work)


def test_the_stock_is_refilled_and_a_sandbox_from_it_is_there_at_once(bubblewrap) -> None:
    async def work() -> None:
        sandboxes = sandbox_source({**bubblewrap, "memory_bytes": 128 * MIB}, {"warm": 2})
        first = await sandboxes.take()
        pool = pool_of(sandboxes)
        await until(lambda: pool.num_warm == 2, "two warm boxes")
        waiting = [r for r in await live_sandboxes(LiveSandboxes()) if r.is_idle]
        assert len(waiting) == 2
        assert {r.reserve_bytes for r in waiting} == {128 * MIB}
        assert {r.ttl_s for r in waiting} == {3900.0}  # it may wait, and lives as long after that
        second = await sandboxes.take()
        assert second.line.path.stem in {r.name for r in waiting}
        assert not any(
            r.is_idle for r in await live_sandboxes(LiveSandboxes()) if r.name == name(second)
        )
        await until(lambda: pool.num_warm == 2, "two warm boxes")
        assert len(await live_sandboxes(LiveSandboxes())) == 4
        await asyncio.gather(sandboxes.give_back(first), sandboxes.give_back(second))
        await until(lambda: pool.num_warm == 2, "two warm boxes")
        await sandboxes.close()
        assert await live_sandboxes(LiveSandboxes()) == []

    on_sandbox_loop(work)


def name(sandbox: Any) -> str:
    stem: str = sandbox.line.path.stem
    return stem


def test_a_warm_sandbox_is_given_out_only_where_the_needs_are_the_same(bubblewrap) -> None:
    seen = "/etc/hostname"

    async def work() -> None:
        sandboxes = sandbox_source(bubblewrap, {"warm": 1})
        await sandboxes.give_back(await sandboxes.take())
        pool = pool_of(sandboxes)
        await until(lambda: pool.num_warm == 1, "a warm box")
        sandbox = await sandboxes.take(ro_binds=[seen])
        assert await sandbox.read_file(seen) == Path(seen).read_bytes()
        await until(lambda: pool.num_warm == 1, "a warm box")  # the stock follows the needs
        again = await sandboxes.take(ro_binds=[seen])
        assert await again.read_file(seen) == Path(seen).read_bytes()
        await asyncio.gather(sandboxes.give_back(sandbox), sandboxes.give_back(again))
        await sandboxes.close()

    on_sandbox_loop(work)


def test_a_warm_sandbox_that_died_is_not_given_out(bubblewrap) -> None:
    async def work() -> None:
        sandboxes = sandbox_source(bubblewrap, {"warm": 1})
        await sandboxes.give_back(await sandboxes.take())
        pool = pool_of(sandboxes)
        await until(lambda: pool.num_warm == 1, "a warm box")
        os.kill(pool._stock[0].sandbox.agent_pid, signal.SIGKILL)
        sandbox = await sandboxes.take()
        assert (await sandbox.exec(["echo", "ok"], timeout_s=30)).stdout == b"ok\n"
        await sandboxes.give_back(sandbox)
        await sandboxes.close()

    on_sandbox_loop(work)


def test_environments_of_one_kind_share_a_stock_until_the_last_is_closed(isolation) -> None:
    async def work() -> None:
        one, other = sandbox_source(isolation, {"warm": 1}), sandbox_source(isolation, {"warm": 1})
        await one.give_back(await one.take())
        await other.give_back(await other.take())
        assert pool_of(one) is pool_of(other)
        await one.close()
        await until(lambda: pool_of(other).num_warm == 1, "a warm box")
        await other.close()
        assert await live_sandboxes(LiveSandboxes()) == []
        await other.give_back(await other.take())
        await other.close()

    on_sandbox_loop(work)


@pytest.mark.parametrize(
    ("options", "needs", "error", "said"),
    [
        ({}, {"ro_binds": ["/no/such"]}, SandboxFailure, "the sandbox is gone.*/no/such"),
        ({"python": "/no/python"}, {}, SandboxFailure, "the sandbox is gone.*/no/python"),
        ({}, {"no_such": 1}, ConfigError, "no_such: unknown key"),
    ],
)
def test_a_start_that_fails_gives_its_capacity_back(
    bubblewrap, options, needs, error, said
) -> None:
    async def work() -> None:
        sandboxes = sandbox_source({**bubblewrap, **options}, {"warm": 1})
        with pytest.raises(error, match=said):
            await sandboxes.take(**needs)
        assert await live_sandboxes(LiveSandboxes()) == []

    on_sandbox_loop(work)


def test_a_take_that_is_cancelled_gives_its_capacity_back(isolation) -> None:
    async def work() -> None:
        sandboxes = sandbox_source(isolation, {"max_sandboxes": 1})
        for delay_s in (0, 0.005, 0.01, 0.02, 0.04, 0.08):  # before, in, and after the start
            taking = asyncio.create_task(sandboxes.take())
            await asyncio.sleep(delay_s)
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sandboxes.give_back(await taking)
        await sandboxes.give_back(await sandboxes.take())
        assert await live_sandboxes(LiveSandboxes()) == []

    on_sandbox_loop(work)


def test_sandboxes_wait_for_one_another(isolation) -> None:
    async def work() -> None:
        sandboxes = sandbox_source(isolation, {"max_sandboxes": 2, "wait_s": 110})
        most = 0

        async def episode() -> None:
            nonlocal most
            sandbox = await sandboxes.take()
            most = max(most, len(await live_sandboxes(LiveSandboxes())))
            assert (await sandbox.exec(["true"], timeout_s=30)).exit_code == 0
            await sandboxes.give_back(sandbox)

        await asyncio.gather(*(episode() for _ in range(8)))
        assert most == 2

    on_sandbox_loop(work)


@contextlib.contextmanager
def owner(
    options: Mapping[str, object], pool: Mapping[str, object], *, then: str = "time.sleep(1000)"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a process that has a box with a snapshot, and a warm stock; give it and an agent's id."""
    code = OWNER.format(options=options, pool=pool, warm=pool.get("warm", 0), then=then)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_processes_share_the_capacity_of_the_machine(isolation) -> None:
    async def work() -> None:
        with pytest.raises(SandboxFailure, match="there are 1 sandboxes, of at most 1"):
            await sandbox_source(isolation, {"max_sandboxes": 1, "wait_s": 0.2}).take()
        patient = sandbox_source(isolation, {"max_sandboxes": 1, "wait_s": 60})
        waiting = asyncio.create_task(patient.take())
        await until(LiveSandboxes().someone_waits, "one that waits")
        process.kill()
        sandbox = await waiting  # the room of a process that is gone is free
        await sandbox.close()
        sandbox.line.close()

    with owner(isolation, {}) as (process, _):
        on_sandbox_loop(work)
        asyncio.run(collect_garbage(LiveSandboxes()))


def test_a_warm_stock_makes_capacity_for_another_process(bubblewrap) -> None:
    async def work() -> None:
        assert len(await live_sandboxes(LiveSandboxes())) == 3
        sandboxes = sandbox_source(bubblewrap, {"max_sandboxes": 2, "wait_s": 60})
        sandbox = await sandboxes.take()
        assert not any(r.is_idle for r in await live_sandboxes(LiveSandboxes()))
        await sandboxes.give_back(sandbox)

    with owner(bubblewrap, {"warm": 2}) as (process, _):
        on_sandbox_loop(work)
        process.kill()
        process.wait()
        asyncio.run(collect_garbage(LiveSandboxes()))


def test_what_a_killed_owner_leaves_is_found_and_removed(isolation, tmp_path) -> None:
    with owner(isolation, {"warm": 1}) as (process, agent):
        left = [what for r in records() for kinds in r.left.values() for what in kinds]
        paths = [Path(what) for what in left if what.startswith("/")]
        assert len([p for p in paths if "snapshots" in p.name and p.is_dir()]) == 1
        process.kill()
        process.wait()
        assert [r.is_orphan for r in records()] == [True, True]
        listed = CliRunner().invoke(app, ["list", "--json"])
        assert [b["state"] for b in json.loads(listed.stdout)["sandboxes"]] == ["orphan"] * 2
        done = CliRunner().invoke(app, ["gc", "--json"])
        assert (done.exit_code, len(json.loads(done.stdout)["removed"])) == (0, 2)
    assert [p for p in paths if p.exists()] == []
    assert records() == []
    wait_gone(agent)


def test_the_first_sandbox_of_a_process_reaps_what_others_left(isolation) -> None:
    with owner(isolation, {}) as (process, _):
        process.kill()
        process.wait()
    assert [r.is_orphan for r in records()] == [True]

    async def work() -> None:
        sandboxes = sandbox_source(isolation)
        sandbox = await sandboxes.take()
        assert [r.name for r in await live_sandboxes(LiveSandboxes())] == [name(sandbox)]
        await sandboxes.give_back(sandbox)

    on_sandbox_loop(work)


def test_commands_that_outlive_a_killed_owner_and_agent_are_killed() -> None:
    then = "loop.submit(next(iter(source_pool()._used.values())).sandbox.exec(['sleep', '1003'], "
    then += "timeout_s=1000))\nprint('x', flush=True)\ntime.sleep(1000)"
    with owner({"id": "process", "trusted": True}, {}, then=then) as (process, agent):
        assert process.stdout is not None
        process.stdout.readline()
        (sleeper,) = wait_until(lambda: children(agent), "a command")
        comm = Path(f"/proc/{sleeper}/comm")
        wait_until(lambda: comm.read_text() == "sleep\n", "its program")  # what it is known by
        os.kill(agent, signal.SIGSTOP)  # it cannot tidy up
        process.kill()
        process.wait()
        os.kill(agent, signal.SIGKILL)
        assert is_running(sleeper)
        assert len(asyncio.run(collect_garbage(LiveSandboxes())).removed) == 1
    wait_gone(sleeper)


def test_snapshots_of_a_process_without_a_ledger_are_swept(bubblewrap) -> None:
    code = """
import asyncio
from rollart_sandboxes.bubblewrap import BubblewrapSandbox
async def main():
    box = BubblewrapSandbox()
    await box.start()
    await box.snapshot()
    print(box._snapshots, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        kept = Path(process.stdout.readline().strip())
        assert asyncio.run(collect_garbage(LiveSandboxes(), sweep=["bubblewrap"])).removed == []
        assert kept.is_dir()
    finally:
        process.kill()
        process.communicate()
    assert asyncio.run(collect_garbage(LiveSandboxes(), sweep=["bubblewrap"])).removed == [
        f"snapshots {kept}"
    ]
    assert not kept.exists()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize(
    "then",
    ["pass", "raise SystemExit(3)", "raise KeyboardInterrupt", "1 / 0"],
    ids=["end", "exit", "ctrl-c", "error"],
)
def test_nothing_is_left_when_an_owner_ends(isolation, then) -> None:
    quiet = f"sys.stderr = open(os.devnull, 'w')\n{then}"
    with owner(isolation, {"warm": 1}, then=quiet) as (process, _):
        process.wait(scaled(60))
    assert records() == []


def test_a_fork_does_not_hold_the_sandboxes_of_its_parent(bubblewrap) -> None:
    # The child says who it is: only then has it let go of what it inherited.
    then = "if not os.fork():\n    print(os.getpid(), flush=True)\ntime.sleep(1000)\n"
    with owner(bubblewrap, {}, then=then) as (process, _):
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        try:
            assert [r.is_orphan for r in records()] == [False]
            process.kill()
            process.wait()
            assert [r.is_orphan for r in records()] == [True]
        finally:
            os.kill(forked, signal.SIGKILL)
        asyncio.run(collect_garbage(LiveSandboxes()))


def test_a_sandbox_that_cannot_be_closed_is_left_to_the_reaper(bubblewrap, monkeypatch) -> None:
    async def work() -> None:
        sandboxes = sandbox_source(bubblewrap)
        sandbox = await sandboxes.take()
        close = sandbox.close

        async def broken() -> None:
            raise OSError("no")

        monkeypatch.setattr(sandbox, "close", broken)
        await sandboxes.give_back(sandbox)
        assert [r.is_orphan for r in await live_sandboxes(LiveSandboxes())] == [True]
        await close()
        assert len((await collect_garbage(LiveSandboxes())).removed) == 1

    on_sandbox_loop(work)


def test_doctor_starts_a_real_sandbox(bubblewrap) -> None:
    done = CliRunner().invoke(app, ["doctor", "bubblewrap", "--json"])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["works"]) == (0, True)
    (found,) = said["sandboxes"]
    assert found["start_ms"] > 0
    assert {f["what"]: f["state"] for f in found["findings"]}["a sandbox"] == "ok"


def test_doctor_of_a_machine_without_bubblewrap(monkeypatch) -> None:
    monkeypatch.setattr("rollart_sandboxes.bubblewrap.shutil.which", lambda _: None)
    done = CliRunner().invoke(app, ["doctor", "bubblewrap"])
    assert done.exit_code == 1
    assert "does not work" in done.stdout
    assert "apt-get install bubblewrap" in " ".join(done.stdout.split())


def test_an_isolation_that_only_trusts_is_not_enough_for_the_doctor(monkeypatch) -> None:
    monkeypatch.setattr("rollart_sandboxes.pool.doctor.sandbox_types", lambda: ["process"])
    done = CliRunner().invoke(app, ["doctor", "--json"])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["works"], said["sandboxes"][0]["works"]) == (1, False, True)
