"""Streams of a box on the side of the host: what is open once they are over."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import warnings

import pytest

from rollart_sandboxes.connection import Target, Tunnels

OPEN = {"s": 1, "op": "open", "forward": 1}
STEPS = 8
"""Of the event loop: after fewer, a stream is open."""


def sent_nowhere(header: object, body: bytes = b"") -> None:
    """The agent's end, which does not matter here."""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a stream, and close it as the proxy of a box does."""
    try:
        while data := await reader.read(100):
            writer.write(data)
    finally:
        writer.close()


async def steps(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def left_open(target: Target, after: int, how: str) -> list[str]:
    """Open a stream, end it after some steps of the loop; return what is open, and was not closed.

    Args:
        target: Where it leads.
        after: The number of steps.
        how: ``close``: with its box; ``reset``: as its program has ended.
    """

    async def main() -> int:
        await steps(1)  # the loop has opened what it needs itself
        before = len(os.listdir("/proc/self/fd"))
        tunnels = Tunnels(sent_nowhere)
        with tunnels.leading_to(target):
            tunnels.take(OPEN, b"")
            await steps(after)
            if how == "close":
                tunnels.close()
            else:
                tunnels.take({"s": 1, "op": "reset"}, b"")
            await steps(STEPS)
            assert not tunnels._tunnels
            return len(os.listdir("/proc/self/fd")) - before

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_files = asyncio.run(main())
        gc.collect()
    return [*(["files"] * num_files), *(str(w.message) for w in caught)]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("after", range(STEPS))
def test_a_stream_that_ends_while_it_is_opened_leaves_no_socket(after: int, how: str) -> None:
    assert left_open(echo, after, how) == []


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("after", range(STEPS))
def test_nor_does_one_that_leads_to_a_port(after: int, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert left_open(server.getsockname()[:2], after, how) == []


def test_a_stream_that_is_opened_twice_is_refused() -> None:
    async def main() -> None:
        tunnels = Tunnels(sent_nowhere)
        with tunnels.leading_to(echo):
            tunnels.take(OPEN, b"")
            with pytest.raises(ValueError, match="stream 1 is opened twice"):
                tunnels.take(OPEN, b"")
            tunnels.close()
            await steps(STEPS)

    asyncio.run(main())
