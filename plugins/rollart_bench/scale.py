"""`rollart bench scale`: how many live trajectories one controller can handle.

The controller, scheduler, buffer, episode loop, conversation and env worker are the real ones. The
engine is scripted. Its answer times are chosen so that all trajectories are live concurrently and
the controller is always the bottleneck. Environments wait on the event loop, and the trainer does
nothing.

Takes: sizes. Gives: rows of trajectories per second and of memory. Never: counts modelled waiting
as work.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import NoTrainer, in_fresh_process
from rollart_bench.skip import require
from rollart_core.config.model import NewModel
from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.inference.router import Router
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeDependencies, EpisodeLimits, Generator, run_episode
from rollart_core.scheduling.buffer import Buffer
from rollart_core.scheduling.controller import BatchRecord, Controller, ControllerDependencies
from rollart_core.scheduling.events import RunStarted, SchedulePolicy
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Group
from rollart_testing import AsyncFakeEnv, FakeEnv, ScriptedEngine

TAKES: Final = ("short",)

ENV = "rollart_testing:AsyncFakeEnv"
TURNS = 5
GROUP_SIZE = 8
OFFERED_TURNS_PER_S = 50_000.0
"""A rate that exceeds the controller's, so that it is never idle."""
MARK_BYTES = 100_000
MARK_RATIO = 0.7


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: one round, 500 live trajectories instead of 10,000.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("scale", options)
    require("tokenizers", extra="train")
    small, large = (100, 500) if asked.short else (100, 10_000)
    rounds = 1 if asked.short else 2
    measured = []
    for number in range(1, rounds + 1):
        measured.append((_measured(small), _measured(large)))
        few, many = (side["trajectories_per_s"] for side in measured[-1])
        echo(f"round {number} of {rounds}: {few:.0f} trajectories/s, with {large} live {many:.0f}")
    ratios = [b["trajectories_per_s"] / a["trajectories_per_s"] for a, b in measured]
    ours = median(b["trajectories_per_s"] for _, b in measured)
    peer = median(a["trajectories_per_s"] for a, _ in measured)
    bytes_each = [b["bytes_per_trajectory"] for _, b in measured]
    live = [b["peak_live"] for _, b in measured]
    rows = [
        row(
            f"{large} live trajectories ({min(live):.0f} at the peak)",
            ours,
            peer,
            f"{small} live",
            "trajectories/s",
            ratios=ratios,
            mark=f">= {MARK_RATIO} of the throughput at {small}",
            meets_mark=median(ratios) >= MARK_RATIO,
        ),
        row(
            f"memory of one of {large} live trajectories",
            median(bytes_each),
            None,
            None,
            "bytes",
            mark=f"< {MARK_BYTES}",
            meets_mark=max(bytes_each) < MARK_BYTES,
        ),
    ]
    return result("scale", rows)


def _measured(num_live: int) -> dict[str, float]:
    """Run one size in a new process: memory is counted from its start."""
    return in_fresh_process(f"{__name__}:measure", {"num_live": num_live})


def measure(asked: Mapping[str, int]) -> dict[str, float]:
    """Run one size in this process and return its rates.

    Args:
        asked: ``num_live`` trajectories.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)
        tokenizer = load_tokenizer(new_model(folder, spec, FakeEnv().corpus(), seed=0))
        return asyncio.run(_measure(asked["num_live"], tokenizer))


class _Counts:
    """Counts episodes that end, and keeps the number of live ones constant."""

    def __init__(self) -> None:
        self.live = self.peak_live = self.ended_count = 0

    def dispatched(self, ticket: object, start_version: int) -> None:
        self.live += 1
        self.peak_live = max(self.peak_live, self.live)

    def ended(self, trajectory: object) -> None:
        self.live -= 1
        self.ended_count += 1

    def decided(self, action: object) -> None:
        """Count nothing."""

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """Count nothing."""

    async def batch_trained(self, record: BatchRecord) -> None:
        """Count nothing."""

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """Count nothing."""


async def _measure(num_live: int, tokenizer: ChatTokenizer) -> dict[str, float]:
    engine = ScriptedEngine(latency_s=num_live / OFFERED_TURNS_PER_S, record=False)
    await engine.start()
    assert AsyncFakeEnv is not None  # the env workers resolve it by name
    ref, envs = EnvRef(ENV, {"turns": TURNS}), await local_pool()
    parts = dependencies(ref, envs, engine, tokenizer, max_turns=TURNS)
    num_groups = max(1, num_live // GROUP_SIZE)
    groups_per_batch = max(1, num_groups // 8)
    policy = SchedulePolicy(
        groups_per_batch=groups_per_batch,
        group_size=GROUP_SIZE,
        max_concurrent=num_live,
        max_staleness=16,
        num_batches=max(2, -(-3 * max(num_live, 2_000) // (2 * GROUP_SIZE * groups_per_batch))),
    )
    counts = _Counts()
    before = _rss_bytes()
    controller = Controller(
        ControllerDependencies(
            scheduler=Scheduler(policy, TaskSource(ENV, "train", 64, 0)),
            buffer=Buffer(GROUP_SIZE, 18 * groups_per_batch * GROUP_SIZE),
            run_episode=lambda ticket, version: run_episode(ticket, version, parts),
            trainer=NoTrainer(),
            engines=Router([engine]),
            keep_group=lambda group: True,
            recorder=counts,
        ),
        ticket_s=600,
        wall_s=None,
    )
    began = time.perf_counter()
    await controller.run(RunStarted())
    wall_s = time.perf_counter() - began
    peak = _peak_rss_bytes()
    await parts.envs.close()
    return {
        "trajectories_per_s": counts.ended_count / wall_s,
        "bytes_per_trajectory": (peak - before) / counts.peak_live,
        "peak_live": float(counts.peak_live),
    }


async def local_pool() -> EnvPool:
    """Start a pool of one env worker in this process."""

    async def start() -> LocalWorker:
        return LocalWorker(EnvWorker())

    envs = EnvPool(start, num_workers=1)
    await envs.start()
    return envs


def dependencies(
    env: EnvRef, envs: EnvPool, engine: Generator, tokenizer: ChatTokenizer, *, max_turns: int
) -> EpisodeDependencies:
    """Return the parts of episodes whose reward is the return of the environment."""

    async def score(request: RewardRequest) -> RewardResult:
        return RewardResult(request.env_return)

    return EpisodeDependencies(
        env=env,
        envs=envs,
        engine=engine,
        new_conversation=lambda: Conversation(tokenizer, max_context_tokens=2048),
        score=score,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
        limits=EpisodeLimits(
            max_turns=max_turns,
            max_new_tokens=16,
            temperature=1.0,
            timeouts=PhaseTimeouts(60, 60),
            generate_s=60,
            episode_s=300,
        ),
        seed=0,
    )


def _rss_bytes() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    return 0.0


def _peak_rss_bytes() -> float:
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
