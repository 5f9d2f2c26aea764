"""The rows of OpenEnv in `rollart bench adapters`: our client beside its own, on one real server.

The server is OpenEnv's, in a process of its own on this machine, so that a good part of every
figure is the server's. Both clients are asyncio; each session plays episodes of five turns, one
after another.

Takes: rounds and seconds of each side in a round. Gives: rows of rollouts/s over all sessions.
Never: leaves the server running.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from typing import Any

from rollart_bench.rows import row, tell
from rollart_bench.skip import require
from rollart_core.errors import RollartError
from rollart_core.plugins import registry

OPENENV = "openenv"
SESSIONS = (1, 32)
NUM_TURNS = 5
UNIT = "rollouts/s"
_SAYS = "hello"
_Episode = Callable[[Any, int], Awaitable[float]]


def rows(rounds: int, seconds: float) -> Iterator[dict[str, object]]:
    """Measure.

    Args:
        rounds: How often the sides take turns.
        seconds: Of each side in a round.

    Raises:
        BenchSkipped: If a package is missing.
        RollartError: When the sides do not play the same.
    """
    require("openenv", "aiohttp", extra="adapters")
    with _server() as url:
        for sessions in SESSIONS:
            name = f"openenv::echo, {sessions} session{'s' * (sessions > 1)}"
            tell(f"{name} ...")
            got = [
                (
                    asyncio.run(_ours(url, sessions, seconds)),
                    asyncio.run(_theirs(url, sessions, seconds)),
                )
                for _ in range(rounds)
            ]
            rates = median(a for a, _ in got), median(b for _, b in got)
            ratios = [a / b for a, b in got]
            yield row(name, *rates, "openenv's own client", UNIT, ratios=ratios)


async def _ours(url: str, sessions: int, seconds: float) -> float:
    async def play(env: Any, seed: int) -> float:
        await env.areset(options={"task": seed})
        total, over = 0.0, False
        while not over:
            _, reward, over, _, _ = await env.astep(_SAYS)
            total += reward
        return total

    envs = [registry.make("openenv::echo", base_url=url, connect_s=60.0) for _ in range(sessions)]
    try:
        return await _rate(envs, play, seconds)
    finally:
        for env in envs:
            env.close()


async def _theirs(url: str, sessions: int, seconds: float) -> float:
    async def play(client: Any, seed: int) -> float:
        await client.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            result = await client.step({"message": _SAYS})
            total, over = total + float(result.reward), result.done
        return total

    make = import_module("openenv.core").GenericEnvClient
    clients = [make(base_url=url, connect_timeout_s=60.0) for _ in range(sessions)]
    try:
        return await _rate(clients, play, seconds)
    finally:
        for client in clients:
            await client.close()


async def _rate(players: list[Any], play: _Episode, seconds: float) -> float:
    """Return episodes per second, all players at once, after one episode of each."""

    async def until(player: Any) -> int:
        num_played = 0
        while time.perf_counter() - began < seconds:
            await play(player, num_played)
            num_played += 1
        return num_played

    returns = await asyncio.gather(*(play(player, 0) for player in players))
    if any(abs(value - NUM_TURNS * 0.5) > 1e-6 for value in returns):
        raise RollartError(f"the echo paid {returns}, not {NUM_TURNS * 0.5:g} an episode")
    began = time.perf_counter()
    played = await asyncio.gather(*(until(player) for player in players))
    return sum(played) / (time.perf_counter() - began)


@contextmanager
def _server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        fd = listening.fileno()
        process = subprocess.Popen([sys.executable, "-m", __name__, str(fd)], pass_fds=[fd])
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.kill()
            process.wait()


def serve(fd: int) -> None:
    """Serve an echo of five turns on an open socket, until killed."""
    types: Any = import_module("openenv.core.env_server.types")
    interfaces: Any = import_module("openenv.core.env_server.interfaces")
    pydantic: Any = import_module("pydantic")
    action = pydantic.create_model("Say", __base__=types.Action, message=(str, ...))
    seen = pydantic.create_model("Heard", __base__=types.Observation, text=(str, ""))

    class Echo(interfaces.Environment):  # type: ignore[misc]
        """Says what it is told."""

        SUPPORTS_CONCURRENT_SESSIONS = True
        state = types.State()

        def reset(self, seed: Any = None, episode_id: Any = None, **more: Any) -> Any:
            """Begin."""
            self.turn = 0
            return seen(text="Say something.")

        def step(self, action: Any, timeout_s: Any = None, **more: Any) -> Any:
            """Repeat."""
            self.turn += 1
            reward = len(action.message) / 10
            return seen(text=action.message, reward=reward, done=self.turn >= NUM_TURNS)

    make_app = import_module("openenv.core.env_server.http_server").create_app
    app = make_app(Echo, action, seen, env_name="echo", max_concurrent_envs=2 * max(SESSIONS))
    import_module("uvicorn").run(app, fd=fd, log_level="error")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
