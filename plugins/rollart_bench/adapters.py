"""`rollart bench adapters`: third-party environments through RollArt and in their own loops.

Each side makes one environment and plays the episodes of seeds 0, 1, 2, ... with the same random
actions, one after the other, in this process. The returns must be equal, and are compared. Our side
uses ``rollart_core.make``: reset, step and the checks of their results. The sides alternate. With
``python=...``, ours runs in that other Python; the native loop stays here.

OpenEnv's environments are on a server. Its rows compare our client with OpenEnv's own client, with
one real server in a separate process on this machine (``python -m rollart_bench.adapters``). The
server takes a large part of each figure. Both clients use asyncio. Each session plays episodes of
five turns, one after another.

Takes: ``rounds``, ``seconds`` (per side and round), ``only`` (an adapter), ``python``, ``short``.
Gives: rows of rollouts/s; a case whose package is not installed is skipped. Never: installs
anything, or leaves the server running.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from random import Random
from statistics import median
from typing import Any, Final

import rollart_core
from rollart_bench import native_envs
from rollart_bench.native_envs import Player
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import BenchSkipped, require
from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.errors import PluginError, RollartError, first_line
from rollart_core.plugins import registry

TAKES: Final = ("rounds", "seconds", "only", "python", "short")

NUM_SEEDS = 200
"""Seeds repeat after this number of episodes."""
NUM_COMPARED = 20
"""Episodes whose returns are compared before anything is measured."""
UNIT = "rollouts/s"
OPENENV = "openenv"
NUM_SESSIONS = (1, 32)
"""Concurrent sessions of OpenEnv."""
NUM_TURNS = 5
"""Turns of its episodes."""
_SAYS = "hello"
_Episode = Callable[[Any, int], Awaitable[float]]


@dataclass(frozen=True)
class Case:
    """One environment, for both sides."""

    adapter: str
    env_id: str
    native: Callable[[str, int], Player]
    action: Callable[[Random], str] | None = None
    """Makes an action with a generator. If None, one of the available actions."""
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id in RollArt."""
        return f"{self.adapter}::{self.env_id}"


def _choice(num_actions: int, rng: Random) -> str:
    return str(rng.randrange(num_actions))


def cases() -> list[Case]:
    """Return every environment to measure."""
    gym, rg = native_envs.gymnasium, native_envs.reasoning_gym
    split = {"splits": {"train": [0, NUM_SEEDS]}}
    rows = {"tasks": {"train": native_envs.gsm8k_rows()}}
    corridor = "rollart_bench.native_envs:Corridor"
    return [
        *(
            Case("gymnasium", env_id, gym, partial(_choice, num_actions), split)
            for env_id, num_actions in (
                ("FrozenLake-v1", 4),
                ("Taxi-v4", 6),
                ("CliffWalking-v1", 4),
                ("Blackjack-v1", 2),
            )
        ),
        *(
            Case("reasoning-gym", name, rg, native_envs.number, {"extract": "text"})
            for name in ("leg_counting", "basic_arithmetic", "spell_backward")
        ),
        *(
            Case("gem", env_id, native_envs.gem, native_envs.boxed)
            for env_id in ("game:GuessTheNumber-v0-easy", "game:Mastermind-v0-hard")
        ),
        *(
            Case("textarena", env_id, native_envs.textarena, native_envs.bracketed)
            for env_id in ("GuessTheNumber-v0", "TowerOfHanoi-v0")
        ),
        Case("skyrl-gym", "gsm8k", native_envs.skyrl_gym, _gsm8k_answer, rows),
        Case("roll-gem", corridor, native_envs.cells, _walk, {"reward_range": [0, 1]}),
    ]


def _gsm8k_answer(rng: Random) -> str:
    return f"#### {native_envs.number(rng)}"


def _walk(rng: Random) -> str:
    return native_envs.Corridor.WORDS[rng.randrange(2)]


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``rounds`` (3), ``seconds`` (2), ``only``, ``python``; ``short``: one round of
            0.3 s.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
    """
    asked = Options("adapters", options)
    rounds = asked.integer("rounds", 1 if asked.short else 3)
    seconds = asked.number("seconds", 0.3 if asked.short else 2.0)
    adapters = [*dict.fromkeys(case.adapter for case in cases()), OPENENV]
    only = asked.names("only", adapters)
    chosen = [case for case in cases() if case.adapter in only]
    more = {"python": asked.text("python", "")} if "python" in asked else {}
    rows, skipped = [], {}
    for case in chosen:
        try:
            rows.append(_row(case, {**case.options, **more}, rounds, seconds))
        except BenchSkipped as e:
            skipped[case.name] = str(e)
    if OPENENV in only:
        try:
            rows += _openenv_rows(rounds, seconds)
        except BenchSkipped as e:
            skipped[OPENENV] = str(e)
    versions = dict(_versions(chosen))
    return result("adapters", rows, skipped_cases=skipped, conditions=versions)


def _row(
    case: Case, options: Mapping[str, object], rounds: int, seconds: float
) -> dict[str, object]:
    """Measure one environment.

    Raises:
        BenchSkipped: If its package is not installed.
    """
    echo(f"{case.name} ...")
    try:
        ours, close = _ours(case, options)
        theirs = case.native(case.env_id, registry.env_spec(case.name, options).max_turns)
    except (PluginError, ImportError) as e:
        if "python" not in options and _version(case.adapter) is not None:
            raise  # its requirements are installed
        raise BenchSkipped(first_line(str(e))) from e
    try:
        _compare(case, ours, theirs)
        got = [(_rate(ours, seconds), _rate(theirs, seconds)) for _ in range(rounds)]
    finally:
        close()
    rates = median(a for a, _ in got), median(b for _, b in got)
    return row(case.name, *rates, "its own loop", UNIT, ratios=[a / b for a, b in got])


def _ours(case: Case, options: Mapping[str, object]) -> tuple[Player, Callable[[], None]]:
    """Return our player, and a function that closes its environment."""
    env: Any = rollart_core.make(case.name, **options)
    action = case.action
    assert action is not None

    def play(seed: int, rng: Random) -> float:
        env.reset(options={"task": seed % num_tasks, "split": "train"})
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(action(rng))
            total, over = total + reward, terminated or truncated
        return total

    num_tasks = env.num_tasks("train")
    return play, env.close


def _compare(case: Case, ours: Player, theirs: Player) -> None:
    """Play the same episodes on both sides.

    Raises:
        RollartError: If a return differs: then the environments are not the same.
    """
    for seed in range(NUM_COMPARED):
        pair = ours(seed, Random(seed)), theirs(seed, Random(seed))
        if abs(pair[0] - pair[1]) > 1e-9:
            raise RollartError(
                f"{case.name}, seed {seed}: a return of {pair[0]}, its own loop's is {pair[1]}"
            )


def _rate(play: Player, seconds: float) -> float:
    """Return episodes per second."""
    began = time.perf_counter()
    num_played = 0
    while (passed := time.perf_counter() - began) < seconds:
        seed = num_played % NUM_SEEDS
        play(seed, Random(seed))
        num_played += 1
    return num_played / passed


def _versions(chosen: list[Case]) -> Iterator[tuple[str, str]]:
    for adapter in dict.fromkeys(case.adapter for case in chosen):
        if version := _version(adapter):
            yield _package(adapter), version


def _version(adapter: str) -> str | None:
    """Return the version of the package that an adapter is for; None if it is not installed."""
    try:
        return metadata.version(_package(adapter))
    except metadata.PackageNotFoundError:
        return None


def _package(adapter: str) -> str:
    spec = registry.spec("env_adapters", adapter)
    return (spec.package if isinstance(spec, EnvAdapterSpec) else "") or "rollart"


def _openenv_rows(rounds: int, seconds: float) -> Iterator[dict[str, object]]:
    """Yield the rows of OpenEnv: rollouts/s over all sessions.

    Args:
        rounds: The number of rounds; sides alternate.
        seconds: Per side and round.

    Raises:
        BenchSkipped: If a package is missing.
        RollartError: If the sides do not play the same episodes.
    """
    require("openenv", "aiohttp", extra="adapters")
    with _server() as url:
        for sessions in NUM_SESSIONS:
            name = f"openenv::echo, {sessions} session{'s' * (sessions > 1)}"
            echo(f"{name} ...")
            got = [
                (
                    asyncio.run(_our_sessions(url, sessions, seconds)),
                    asyncio.run(_their_sessions(url, sessions, seconds)),
                )
                for _ in range(rounds)
            ]
            rates = median(a for a, _ in got), median(b for _, b in got)
            ratios = [a / b for a, b in got]
            yield row(name, *rates, "openenv's own client", UNIT, ratios=ratios)


async def _our_sessions(url: str, sessions: int, seconds: float) -> float:
    async def play(env: Any, seed: int) -> float:
        await env.areset(options={"task": seed})
        total, over = 0.0, False
        while not over:
            _, reward, over, _, _ = await env.astep(_SAYS)
            total += reward
        return total

    envs = [registry.make("openenv::echo", base_url=url, connect_s=60.0) for _ in range(sessions)]
    try:
        return await _rate_of_all(envs, play, seconds)
    finally:
        for env in envs:
            env.close()


async def _their_sessions(url: str, sessions: int, seconds: float) -> float:
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
        return await _rate_of_all(clients, play, seconds)
    finally:
        for client in clients:
            await client.close()


async def _rate_of_all(players: list[Any], play: _Episode, seconds: float) -> float:
    """Return episodes per second of all concurrent players, after one warm-up episode each."""

    async def until(player: Any) -> int:
        num_played = 0
        while time.perf_counter() - began < seconds:
            await play(player, num_played)
            num_played += 1
        return num_played

    returns = await asyncio.gather(*(play(player, 0) for player in players))
    if any(abs(value - NUM_TURNS * 0.5) > 1e-6 for value in returns):
        raise RollartError(f"the echo env returned {returns}, not {NUM_TURNS * 0.5:g} per episode")
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
    """Serve an echo environment of five turns on an open socket, until the process is killed."""
    types: Any = import_module("openenv.core.env_server.types")
    interfaces: Any = import_module("openenv.core.env_server.interfaces")
    pydantic: Any = import_module("pydantic")
    action = pydantic.create_model("Say", __base__=types.Action, message=(str, ...))
    seen = pydantic.create_model("Heard", __base__=types.Observation, text=(str, ""))

    class Echo(interfaces.Environment):  # type: ignore[misc]
        """Returns each message to the sender."""

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
    app = make_app(Echo, action, seen, env_name="echo", max_concurrent_envs=2 * max(NUM_SESSIONS))
    import_module("uvicorn").run(app, fd=fd, log_level="error")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
