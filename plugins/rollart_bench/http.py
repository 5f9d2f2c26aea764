"""`rollart bench http`: requests per second of `rollart eval` and of a bare client, to one server.

    server process: answers each chat request at once, with the text of its last message
        ^ HTTP
        |-- ours:  `rollart eval --model URL`: episodes of a 5-turn echo, each recorded as a whole
        |-- peer:  aiohttp alone: the same requests in the same order, the answers are parsed

The server answers without delay, so that nothing hides the cost of a client. The sides alternate,
with 1, 8, 32 and 128 concurrent episodes. ``rollart eval`` has its default processes: controller,
engine and environments.

Takes: ``rounds``, ``seconds`` (of the peer), ``concurrent``, ``short``. Gives: requests per second
while episodes are played. Never: counts the start of a process, or an evaluation with a failed or
incomplete episode.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollart_bench.echo import FIRST, NUM_TASKS, TURNS
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.errors import RollartError, UserError
from rollart_evals.episodes import Episode
from rollart_evals.prepare import EvalRequest, begin
from rollart_evals.run import run_evaluation

TAKES: Final = ("rounds", "seconds", "concurrent", "short")

MARK: Final = 0.8
MARKED: Final = (32, 128)
"""Concurrent episodes to which the mark applies."""
CONCURRENT: Final = ("1", "8", "32", "128")
MAX_CONCURRENT: Final = 1024
MAX_TOKENS: Final = 16
ENV: Final = "rollart_bench.echo:AsyncEchoEnv"
PEER: Final = "aiohttp"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``rounds`` (3), ``seconds`` (3) that the peer is measured (ours plays as many
            episodes), ``concurrent`` (1,8,32,128), or ``short``: one round of 0.2 s, 1 and 8.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("http", options)
    require("aiohttp", extra="gateway")
    rounds = asked.integer("rounds", 1 if asked.short else 3)
    seconds = asked.number("seconds", 0.2 if asked.short else 3.0)
    sizes = _sizes(asked.names("concurrent", (), CONCURRENT[:2] if asked.short else CONCURRENT))
    rows: list[dict[str, object]] = []
    with server() as url:
        for size in sizes:
            got: list[tuple[float, float]] = []
            for number in range(1, rounds + 1):
                theirs, num_episodes = asyncio.run(bare(url, size, seconds))
                got.append((evaluated(url, size, num_episodes), theirs))
                says = f"{got[-1][0]:.0f} requests/s, {PEER} {theirs:.0f}"
                echo(f"{size} at once, round {number} of {rounds}: {says}")
            rows.append(_row(size, got))
    return result("http", rows)


def _sizes(names: tuple[str, ...]) -> list[int]:
    sizes = [int(name) if name.isdecimal() else 0 for name in names]
    if not all(1 <= size <= MAX_CONCURRENT for size in sizes):
        raise UserError(
            f"bench http: concurrent={','.join(names)!r}: must be numbers of episodes, 1 to "
            f"{MAX_CONCURRENT}, such as concurrent={','.join(CONCURRENT)}"
        )
    return sizes


def _row(size: int, got: Sequence[tuple[float, float]]) -> dict[str, object]:
    return row(
        f"{size} at once, {TURNS} turns",
        median(ours for ours, _ in got),
        median(theirs for _, theirs in got),
        PEER,
        "requests/s",
        ratios=[ours / theirs for ours, theirs in got],
        mark=MARK if size in MARKED else None,
    )


class _Clock:
    """Measures the time in which the last player's episodes are played, from the display."""

    def __init__(self) -> None:
        self.began_s = self.ended_s = 0.0

    def phase(self, name: str, detail: str = "") -> None:
        self.began_s = time.perf_counter()

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        self.ended_s = time.perf_counter()

    def message(self, text: str) -> None:
        echo(text)


def evaluated(url: str, size: int, num_episodes: int) -> float:
    """Return the requests per second of an evaluation.

    The same episodes are played twice, sampled and greedy, and the second time counts: in the first
    one, the processes import and connect.

    Args:
        url: The server.
        size: The number of concurrent episodes.
        num_episodes: The number of episodes.

    Raises:
        RollartError: If an episode failed, or was not recorded as a whole.
    """
    given = (
        f"evaluation.tasks={min(num_episodes, NUM_TASKS)}",
        "evaluation.greedy=true",
        f"rollout.max_concurrent={size}",
        f"rollout.max_turns={TURNS}",
        f"rollout.max_new_tokens={MAX_TOKENS}",
    )
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as folder:
        begun = begin(EvalRequest(settings=given, env=ENV, model=url, out=Path(folder) / "eval"))
        report = run_evaluation(begun.run, begun.plan, begun.folder, observer=clock)
    check_episodes(report.episodes, 2 * num_episodes)
    return TURNS * num_episodes / (clock.ended_s - clock.began_s)


def check_episodes(episodes: Sequence[Episode], num_episodes: int) -> None:
    """Check the recorded episodes.

    Raises:
        RollartError: If one failed or is not whole.
    """
    whole = [e for e in episodes if e.num_turns == TURNS and e.score is not None]
    num_right = sum(abs((e.score or 0) - 1) < 1e-9 for e in whole)
    if num_right != num_episodes:
        why = next((f": {e.why}" for e in episodes if e.why), "")
        raise RollartError(f"{num_right} of {num_episodes} episodes are complete{why}")


async def bare(url: str, size: int, seconds: float) -> tuple[float, int]:
    """Send the same requests with aiohttp alone.

    Args:
        url: The server.
        size: The number of concurrent episodes.
        seconds: After this time, no episode begins.

    Returns:
        Requests per second, and the number of episodes.
    """
    import aiohttp

    async def episode(seed: int) -> None:
        messages = [{"role": "user", "content": FIRST}]
        for _ in range(TURNS):
            body = {"model": "echo", "messages": messages, "max_tokens": MAX_TOKENS}
            body |= {"temperature": 1.0, "seed": seed}
            async with http.post(f"{url}/chat/completions", json=body) as got:
                answer = await got.json()
            said = answer["choices"][0]["message"]["content"]
            if said != messages[-1]["content"]:
                raise RollartError(f"the server answered {said!r}")
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": said},
            ]

    async def until() -> int:
        num_played = 0
        while not num_played or time.perf_counter() - began < seconds:
            await episode(2**30 + num_played)
            num_played += 1
        return num_played

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await episode(0)
        began = time.perf_counter()
        num_episodes = sum(await asyncio.gather(*(until() for _ in range(size))))
        return TURNS * num_episodes / (time.perf_counter() - began), num_episodes


@contextmanager
def server() -> Iterator[str]:
    """Run the server in a process, and provide its base URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_CONCURRENT) as listening:
        fd = listening.fileno()
        process = subprocess.Popen([sys.executable, "-m", __name__, str(fd)], pass_fds=[fd])
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            process.kill()
            process.wait()


def serve(fd: int) -> None:
    """Serve on an open socket, until the process is killed."""
    from aiohttp import web

    async def chat(request: web.Request) -> web.Response:
        asked: Any = json.loads(await request.read())
        said = asked["messages"][-1]["content"]
        choice = {"index": 0, "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": len(asked["messages"]), "completion_tokens": 1}
        return web.json_response(
            {"id": "x", "choices": [{**choice, "finish_reason": "stop"}], "usage": usage}
        )

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "echo", "object": "model"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    web.run_app(app, sock=socket.socket(fileno=fd), print=lambda *said: None, access_log=None)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
