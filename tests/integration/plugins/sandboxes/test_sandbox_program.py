"""Programs in a box that are spoken with over a stream, behind every wall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.pace import scaled
from support.sandbox_types import EACH_SANDBOX_TYPE, missing, opened

from rollart_core.contracts.sandbox import ExecResult
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.base import AgentSandbox

ECHO = 'while read -r line; do echo "$line"; done; echo the end; echo bye >&2; exit 3'


class Talk:
    """One program and what it said."""

    def __init__(self, sandbox: AgentSandbox, *argv: str, timeout_s: float = 60.0) -> None:
        self.heard = bytearray()
        self.write: Callable[[bytes], None] | None = None
        self.more = asyncio.Event()
        self.ended: asyncio.Task[ExecResult] = asyncio.create_task(
            sandbox.program(argv, take=self.take, begun=self.begun, timeout_s=timeout_s)
        )

    def take(self, data: bytes) -> None:
        self.heard += data
        self.more.set()

    def begun(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    async def until(self, length: int) -> bytes:
        async with asyncio.timeout(scaled(60)):
            while len(self.heard) < length:
                self.more.clear()
                await self.more.wait()
        return bytes(self.heard)


@pytest.fixture(params=EACH_SANDBOX_TYPE)
def isolation(request: pytest.FixtureRequest) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


def test_a_program_answers_as_it_is_spoken_to(isolation: str) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            one, two = Talk(sandbox, "/bin/sh", "-c", ECHO), Talk(sandbox, "cat")
            await asyncio.sleep(0)
            assert one.write is not None
            assert two.write is not None
            one.write(b"hello\n")
            assert await one.until(6) == b"hello\n"
            big = b"x" * 3_000_000
            two.write(big)
            assert await two.until(len(big)) == big, "more than a window, both ways"
            one.write(b"again\n")
            assert await one.until(12) == b"hello\nagain\n"
            assert (await sandbox.exec(["echo", "beside"], timeout_s=30)).stdout == b"beside\n"
            two.ended.cancel()
            with pytest.raises(asyncio.CancelledError):
                await two.ended
            assert not one.ended.done()
            one.ended.cancel()

    asyncio.run(main())


def test_the_end_of_a_program_brings_its_last_words_and_its_code(isolation: str) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            for _ in range(20):
                talk = Talk(sandbox, "/bin/sh", "-c", "echo last words; echo why >&2; exit 5")
                ended = await talk.ended
                assert (ended.exit_code, ended.stderr) == (5, b"why\n")
                assert bytes(talk.heard) == b"last words\n"
            ended = await Talk(sandbox, "no-such-program").ended
            assert ended.exit_code == 127
            assert b"no-such-program" in ended.stderr
            ended = await Talk(sandbox, "sleep", "100", timeout_s=0.2).ended
            assert ended.timed_out

    asyncio.run(main())


def test_a_program_that_is_cancelled_is_killed_with_all_it_started(isolation: str) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            talk = Talk(sandbox, "/bin/sh", "-c", "sleep 1000 & echo $$ $!; wait")
            await talk.until(4)
            talk.ended.cancel()
            with pytest.raises(asyncio.CancelledError):
                await talk.ended
            for pid in talk.heard.decode().split():
                while not (
                    await sandbox.exec(["test", "-d", f"/proc/{pid}"], timeout_s=30)
                ).exit_code:
                    await asyncio.sleep(0.02)  # the test's timeout ends the wait

    asyncio.run(main())


def test_the_end_of_the_sandbox_is_the_end_of_its_programs(isolation: str) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            talk = Talk(sandbox, "cat")
            await asyncio.sleep(0)
            assert talk.write is not None
            talk.write(b"x")
            await talk.until(1)
        with pytest.raises(SandboxFailure, match="closed"):
            await talk.ended

    asyncio.run(main())
