import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rollart_core.errors import ConfigError, DeadlineFailure, PartDied
from rollart_core.runtime.process import PartProcess


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


def test_calls_answers_and_errors_cross_the_process_boundary():
    async def main() -> None:
        part = PartProcess("test")
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
        part = PartProcess("test")
        with pytest.raises(TypeError, match="unexpected keyword"):
            await part.start(FACTORY, {"stop": 1})
        await part.close()

    asyncio.run(main())


def test_a_killed_part_fails_its_calls_and_tells_its_owner(tmp_path):
    async def main() -> None:
        part = PartProcess("engine", log_path=tmp_path / "engine.log")
        died = asyncio.Event()
        part.on_death = lambda _: died.set()
        await part.start(FACTORY)
        waiting = asyncio.create_task(part.call("wait"))
        await part.call("add", 1)
        os.kill(part.pid, signal.SIGKILL)
        with pytest.raises(PartDied, match=r"engine process is gone \(signal SIGKILL\); see .*log"):
            await waiting
        await died.wait()
        with pytest.raises(PartDied):
            await part.call("add", 1)
        await part.close()

    asyncio.run(main())


def test_a_part_ends_with_a_killed_owner():
    program = f"""
import asyncio, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from rollart_core.runtime.process import PartProcess
async def main():
    part = PartProcess("orphan")
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
    import select

    ended, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert ended, "the part outlived its owner"


def test_user_errors_survive_the_journey():
    async def main() -> None:
        part = PartProcess("test")
        await part.start()
        with pytest.raises(ConfigError, match=r"no_such\.yaml"):
            await part.call("rollart_core.config_load:load_config", "no_such.yaml")
        await part.close()

    asyncio.run(main())
