"""`rollart bench controller`: the cost of a turn in the controller, by the length of its context.

    this process: episode loop, conversation, router messages  <-> engine process (scripted answers)
                                                               <-> env worker process

The first observation fills the context of each episode. Once all episodes have it, they take short
turns; only those count. CPU time is that of the controller's process. With ``peer``, a checkout of
RollArt at another commit plays the same episodes, in turn with this one.

Takes: ``rounds``, ``turns``, ``peer``, ``short``. Gives: rows of CPU time per turn and of turns per
second. Never: counts the first observation, or work of the engine and the environments.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, ClassVar, Final

import gymnasium

from rollart_bench.env import MODEL
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.scale import dependencies
from rollart_bench.sides import checkout_of, in_fresh_process
from rollart_bench.skip import require
from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.contracts.inference import GenerateRequest, GenerateResult, InferenceEngineSpec
from rollart_core.errors import RollartError
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import run_episode
from rollart_core.runtime.factories import ModelArgs
from rollart_core.runtime.garbage_collection import short_gc_pauses
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import RemoteEngine, RemoteWorker
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.spaces import Text
from rollart_core.types import Ticket

TAKES: Final = ("rounds", "turns", "peer", "short")
LENGTHS: Final = (1_000, 8_000, 32_000)
"""Tokens of the context when the counted turns begin."""
NUM_EPISODES: Final = 16
"""Episodes at once."""
MARK_LENGTH: Final = 1.5
"""The target for a turn of the longest context, in turns of the shortest."""
MARK_PEER: Final = 1.0
"""The target for the other commit's cost of a turn of the shortest context, over ours."""
SHOWS: Final = "hello there, again"
_WORD: Final = "hello there "
_ENGINE: Final = "rollart_testing:ScriptedEngine"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``rounds`` (5), ``turns`` (64) of each episode, ``peer`` (the folder of a
            checkout), or ``short``: one round of 8 turns.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
    """
    asked = Options("controller", options)
    require("tokenizers", extra="train")
    peer = checkout_of("controller", asked.text("peer", ""))
    sides = ["", peer] if peer else [""]
    num_turns = asked.integer("turns", 8 if asked.short else 64)
    rounds = asked.integer("rounds", 1 if asked.short else 5)
    got: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            costs = in_fresh_process(f"{__name__}:measure", {"turns": num_turns}, checkout=side)
            got[side].append(costs)
            shown = ", ".join(f"{cost['us']:.0f}" for cost in costs.values())
            echo(f"round {number + 1} of {rounds}: {side or 'ours'}: {shown} us of CPU time a turn")
    return result("controller", [*_length_rows(got[""]), *_peer_rows(got, peer)])


def _length_rows(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    shortest, *longer = map(str, LENGTHS)
    rows = []
    for length in map(str, LENGTHS):
        case, is_longest = f"a turn at {int(length):,} tokens", length == longer[-1]
        cost = median(one[length]["us"] for one in rounds)
        base = median(one[shortest]["us"] for one in rounds)
        ratios = [one[length]["us"] / one[shortest]["us"] for one in rounds]
        is_compared = length != shortest
        rows.append(
            row(
                case,
                cost,
                base if is_compared else None,
                f"{int(shortest):,} tokens" if is_compared else None,
                "us of CPU time (ratio: longer over shorter)",
                ratios=ratios if is_compared else None,
                mark=f"at most {MARK_LENGTH}" if is_longest else None,
                meets_mark=median(ratios) <= MARK_LENGTH if is_longest else None,
            )
        )
        rate = median(one[length]["turns_per_s"] for one in rounds)
        rows.append(row(f"{case}, {NUM_EPISODES} episodes at once", rate, None, None, "turns/s"))
        ms = median(one[length]["ms"] for one in rounds)
        rows.append(row(f"{case}, from request to request", ms, None, None, "ms"))
    return rows


def _peer_rows(got: Mapping[str, Sequence[Mapping[str, Any]]], peer: str) -> list[dict[str, Any]]:
    rows = []
    for length in map(str, LENGTHS) if peer else ():
        ours, theirs = ([one[length]["us"] for one in got[side]] for side in ("", peer))
        rows.append(
            row(
                f"a turn at {int(length):,} tokens, and at the other commit",
                median(ours),
                median(theirs),
                "the other commit",
                "us of CPU time (ratio: theirs over ours)",
                ratios=[b / a for a, b in zip(ours, theirs, strict=True)],
                mark=MARK_PEER if length == str(LENGTHS[0]) else None,
            )
        )
    return rows


class LongEnv(gymnasium.Env[str, str]):
    """Shows a long text first, then short ones.

    Args:
        num_chars: Length of the first text.
        turns: Number of turns.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, num_chars: int, turns: int) -> None:
        self.observation_space = self.action_space = Text()
        self._first = (_WORD * (num_chars // len(_WORD) + 1))[:num_chars]
        self._turns, self._turn = turns, 0

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has. All are the same."""
        return NUM_EPISODES

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin."""
        self._turn = 0
        return self._first, {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Show the next text."""
        self._turn += 1
        return SHOWS, 0.0, self._turn > self._turns, False, {}


class _Clock:
    """An engine whose first and last turns wait for those of all episodes."""

    def __init__(self, engine: Any, num_turns: int) -> None:
        self._engine, self._last = engine, num_turns
        self._first_barrier = asyncio.Barrier(NUM_EPISODES)
        self._last_barrier = asyncio.Barrier(NUM_EPISODES)
        self.num_tokens = 0
        self.began = self.ended = (0.0, 0.0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn."""
        turn = int(request.request_id.rpartition("/")[2])
        if turn == 0:
            self.num_tokens = len(request.token_ids)
            await self._first_barrier.wait()
            self.began = self.began if self.began[1] else _now()
        elif turn == self._last:
            self.ended = _now()
            await self._last_barrier.wait()
        result: GenerateResult = await self._engine.generate(request)
        return result

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.release(session_id)


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def measure(asked: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Play the episodes of each length in this process, and return what their turns cost.

    Args:
        asked: ``turns`` of each episode.
    """
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as folder:
        path = new_model(folder, MODEL, [_WORD, SHOWS] * 20, seed=0)
        return asyncio.run(_measure(asked["turns"], load_tokenizer(str(path))))


async def _measure(num_turns: int, tokenizer: ChatTokenizer) -> dict[str, dict[str, float]]:
    spec = InferenceEngineSpec(id=_ENGINE, summary="Answers at once.", entry_point=_ENGINE)
    plugin = ResolvedPlugin("inference_engines", spec, {"record": False}, "rollart", "0")
    arguments = {"plugin": plugin, "model": ModelArgs(""), "channel": None, "settings": {}}
    engine = RemoteEngine(lambda: WorkerProcess("engine"), arguments)
    envs = EnvPool(_start_worker, num_workers=1)
    try:
        await engine.start()
        await envs.start()
        with short_gc_pauses():
            # The first episodes fill the caches and are not counted.
            await _play(LENGTHS[0], num_turns, tokenizer, engine, envs)
            return {
                str(length): await _play(length, num_turns, tokenizer, engine, envs)
                for length in LENGTHS
            }
    finally:
        await envs.close()
        await engine.close()


async def _start_worker() -> RemoteWorker:
    worker = WorkerProcess("env")
    limits = {"num_threads": 4, "max_observation_chars": 1_000_000}
    await worker.start("rollart_core.runtime.factories:build_env_worker", limits)
    return RemoteWorker(worker)


async def _play(
    length: int, num_turns: int, tokenizer: ChatTokenizer, engine: RemoteEngine, envs: EnvPool
) -> dict[str, float]:
    """Play episodes at once; return the cost of a turn.

    Raises:
        RollartError: If an episode failed or is not as long as planned.
    """
    sample = _WORD * 100
    num_chars = round(length * len(sample) / len(tokenizer.encode(sample)))
    clock = _Clock(engine, num_turns)
    env = EnvRef(f"{__name__}:LongEnv", {"num_chars": num_chars, "turns": num_turns})
    parts = dependencies(env, envs, clock, tokenizer, max_turns=num_turns + 1)
    parts = replace(
        parts,
        new_conversation=lambda: Conversation(tokenizer, max_context_tokens=4 * LENGTHS[-1]),
    )
    source = TaskSource(env.id, "train", None, 0)
    tickets = [
        Ticket(f"{length}.{index}", source.next(), "g", index) for index in range(NUM_EPISODES)
    ]
    played = await asyncio.gather(*(run_episode(ticket, 0, parts) for ticket in tickets))
    for trajectory in played:
        if trajectory.failure or len(trajectory.turns) != num_turns + 1:
            why = trajectory.failure.message if trajectory.failure else "too few turns"
            raise RollartError(f"an episode of {length} tokens: {why}")
    if not 0.9 < clock.num_tokens / length < 1.1:
        raise RollartError(f"{clock.num_tokens} tokens instead of {length}")
    cpu_s, wall_s = (after - before for before, after in zip(clock.began, clock.ended, strict=True))
    turns = NUM_EPISODES * num_turns
    return {
        "us": 1e6 * cpu_s / turns,
        "turns_per_s": turns / wall_s,
        "ms": 1e3 * wall_s / num_turns,
    }
