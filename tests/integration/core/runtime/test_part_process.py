import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from support.pace import scaled

from rollart_core.errors import ConfigError, DeadlineFailure, EpisodeError, WorkerDied
from rollart_core.rollout.env_pool import EnvPool, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import RemoteWorker
from rollart_core.scheduling.failure_rate import RetryBudget
from rollart_core.types import Failure, FailureKind, Task, Ticket


class Part:
    """What the child builds in these tests."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def fail(self) -> None:
        raise DeadlineFailure("too slow", boundary="env.step")

    def odd_error(self) -> None:
        class Local(Exception):
            pass

        raise Local("does not travel")

    def odd_answer(self) -> object:
        return lambda: None

    def pid(self) -> int:
        return os.getpid()


FACTORY = f"{__name__}:Part"


@pytest.mark.starts_normally
def test_calls_answers_and_errors_cross_the_process_boundary():
    async def main() -> None:
        part = WorkerProcess("test")
        await part.start(FACTORY, {"start": 40})
        assert await part.call("add", 2) == 42
        assert await part.call("pid") == part.pid != os.getpid()
        with pytest.raises(DeadlineFailure, match="too slow") as caught:
            await part.call("fail")
        assert caught.value.boundary == "env.step"
        with pytest.raises(Exception, match="Local: does not travel"):
            await part.call("odd_error")
        with pytest.raises(Exception, match="unsendable answer"):
            await part.call("odd_answer")
        assert await part.call("os:getpid") == part.pid
        await part.close()
        assert not part.alive

    asyncio.run(main())


def test_a_factory_that_raises_says_so():
    async def main() -> None:
        part = WorkerProcess("test")
        with pytest.raises(TypeError, match="unexpected keyword"):
            await part.start(FACTORY, {"stop": 1})
        await part.close()

    asyncio.run(main())


@pytest.mark.starts_normally
def test_a_killed_part_fails_its_calls_and_notifies_its_owner(tmp_path):
    async def main() -> None:
        part = WorkerProcess("engine", log_path=tmp_path / "engine.log")
        died = asyncio.Event()
        part.on_death = lambda _: died.set()
        await part.start(FACTORY)
        waiting = asyncio.create_task(part.call("wait"))
        await part.call("add", 1)
        os.kill(part.pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"engine process is gone \(signal SIGKILL\); see .*log"
        ):
            await waiting
        await died.wait()
        with pytest.raises(WorkerDied):
            await part.call("add", 1)
        await part.close()

    asyncio.run(main())


def test_a_part_ends_with_a_killed_owner():
    program = f"""
import asyncio, os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[3])]!r}
from rollart_core.runtime.process import WorkerProcess
async def main():
    part = WorkerProcess("orphan")
    await part.start("test_part_process:Part")
    print(part.pid, flush=True)
    await part.call("wait")
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    descriptor = os.pidfd_open(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ended, _, _ = select.select([descriptor], [], [], scaled(60))
    os.close(descriptor)
    assert ended, "the part outlived its owner"


def test_user_errors_survive_the_journey():
    async def main() -> None:
        part = WorkerProcess("test")
        await part.start()
        with pytest.raises(ConfigError, match=r"no_such\.yaml"):
            await part.call("rollart_core.config.load:load_config", "no_such.yaml")
        await part.close()

    asyncio.run(main())


class Slow(gymnasium.Env[str, str]):
    """Is made once a server says so, and tells it when it is closed."""

    def __init__(self, *, port: int) -> None:
        self._server = socket.create_connection(("127.0.0.1", port))
        self._server.recv(1)

    def close(self) -> None:
        self._server.close()


def test_an_episode_that_is_aborted_closes_what_its_worker_process_is_about_to_make():
    made: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    closed: asyncio.Queue[None] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.put_nowait(writer)
        await reader.read()
        writer.close()
        closed.put_nowait(None)

    async def start() -> RemoteWorker:
        part = WorkerProcess("env")
        limits = {"num_threads": 4, "max_observation_chars": 100}
        await part.start("rollart_core.runtime.factories:build_env_worker", limits)
        return RemoteWorker(part)

    async def play(pool: EnvPool, number: int, port: int) -> None:
        ticket = Ticket("g.0", Task("slow", "train", 0, 0), "g", 0)
        async with pool.episode(f"e{number}", PhaseTimeouts(60, 60)) as episode:
            await episode.reset(EnvRef(f"{__name__}:Slow", {"port": port}), ticket)

    async def main() -> None:
        pool = EnvPool(start, num_workers=1)
        async with (
            await asyncio.start_server(serve, "127.0.0.1", 0) as server,
            asyncio.timeout(scaled(60)),
        ):
            port = server.sockets[0].getsockname()[1]
            await pool.start()
            playing = [asyncio.create_task(play(pool, n, port)) for n in range(3)]
            writers = [await made.get() for _ in playing]
            for episode in playing:
                episode.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            for writer in writers:
                writer.write(b"!")
            async with asyncio.timeout(scaled(60)):  # its worker goes on
                for _ in playing:
                    await closed.get()
            await pool.close()

    asyncio.run(main())


class EndsItsProcess(gymnasium.Env[str, str]):
    """Ends its process in the first step of one task; the others wait for a second step."""

    def reset(self, *, seed=None, options=None):
        self._is_bad = options["task"] == 0
        return "begin", {}

    def step(self, action):
        if self._is_bad:
            os._exit(3)
        return "end", 1.0, action == "last", False, {}


def test_an_environment_that_ends_its_process_harms_only_itself():
    failures: dict[int, list[str]] = {}

    async def start() -> RemoteWorker:
        part = WorkerProcess("env")
        limits = {"num_threads": 4, "max_observation_chars": 100}
        await part.start("rollart_core.runtime.factories:build_env_worker", limits)
        return RemoteWorker(part)

    async def play(pool: EnvPool, index: int, ready: asyncio.Barrier, attempt: int) -> bool:
        task = Task("any", "train", index, 0)
        ticket = Ticket(f"g{index}.0", task, f"g{index}", 0, attempt)
        try:
            async with pool.episode(f"e{index}", PhaseTimeouts(60, 60), task) as episode:
                await episode.reset(EnvRef(f"{__name__}:EndsItsProcess"), ticket)
                if attempt == 0:
                    await ready.wait()  # all share one process
                if index and attempt == 0:
                    await asyncio.wait({bad})  # by then the process is gone
                await episode.step("last")
        except EpisodeError as e:
            failures.setdefault(index, []).append(str(e.kind))
            return False
        return True

    async def replay(pool: EnvPool, index: int, ready: asyncio.Barrier) -> None:
        budget, attempt = RetryBudget(), 0
        while not await play(pool, index, ready, attempt):
            failure = Failure(FailureKind(failures[index][-1]), "env.step", "ended")
            if not budget.take(failure, max_retries=2):
                return
            attempt += 1

    async def main() -> None:
        nonlocal bad
        pool = EnvPool(start, num_workers=1)
        await pool.start()
        ready = asyncio.Barrier(9)
        async with asyncio.timeout(scaled(120)):
            bad = asyncio.create_task(replay(pool, 0, ready))
            await asyncio.gather(bad, *(replay(pool, index, ready) for index in range(1, 9)))
        await pool.close()

    bad: asyncio.Task[None]
    asyncio.run(main())
    assert failures.pop(0) == ["infrastructure", *["environment"] * 3]
    assert failures == {index: ["collateral"] for index in range(1, 9)}


class StartsASession:
    """A part that starts a process in a session of its own."""

    def start(self) -> int:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        return subprocess.Popen(command, start_new_session=True).pid

    def end(self) -> None:
        os._exit(3)


@pytest.mark.parametrize("how", ["closed", "ends itself"])
def test_what_a_part_started_in_a_new_session_ends_with_it(how):
    async def main() -> None:
        part = WorkerProcess("test")
        await part.start(f"{__name__}:StartsASession")
        descriptor = os.pidfd_open(await part.call("start"))
        if how == "ends itself":
            with pytest.raises(WorkerDied, match="exit code 3"):
                await part.call("end")
        await part.close()
        ended = await asyncio.to_thread(select.select, [descriptor], [], [], scaled(60))
        os.close(descriptor)
        assert ended[0], "the process outlived its part"

    asyncio.run(main())


class Ends:
    """A part that writes, starts a program that outlives it, and ends its process."""

    def by(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def with_code(self, code: int) -> None:
        print("first\n" + "x" * 200_000, flush=True)
        os.system("sleep 600 &")
        os.write(2, b"why\n\n")
        os._exit(code)


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_the_signal_that_ended_a_part_is_known_to_its_caller(number):
    async def main() -> None:
        part = WorkerProcess("test")
        await part.start(f"{__name__}:Ends")
        with pytest.raises(WorkerDied, match=f"signal {number.name}") as caught:
            await part.call("by", number)
        assert caught.value.exit_code == -number
        with pytest.raises(WorkerDied) as caught:
            await part.call("by", number)
        assert caught.value.exit_code == -number
        await part.close()

    asyncio.run(main())


@pytest.mark.starts_normally
def test_the_last_line_of_a_part_says_why_it_ended():
    async def main() -> None:
        part = WorkerProcess("test", keep_output=True)
        await part.start(f"{__name__}:Ends")
        with pytest.raises(WorkerDied, match=r"\(exit code 3\): why$") as caught:
            await part.call("with_code", 3)  # though what it started goes on
        assert caught.value.exit_code == 3
        await part.close()

    asyncio.run(main())
