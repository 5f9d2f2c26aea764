"""`rollart bench affinity`: envs on the hardware that suits them, compared with other placements.

Prefill-heavy and decode-heavy environments run concurrently over engines of two classes: one with
high FLOP/s, one with high bandwidth. Controller, scheduler, router, env pool and episodes are the
real ones. Engines wait as long as one of their devices would take
(:mod:`rollart_testing.modelled_engine`), and the trainer takes no time. All placements run
concurrently, each with its own workers, so that any disturbance affects all of them.

Takes: ``short``, ``seconds``, ``seeds``, ``faster``. Gives: trajectories/s of `affinity` compared
with `colocate`, `random` and an even spread, and with what ``rollart plan`` expects. Never: uses a
GPU.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean, median
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import NoTrainer
from rollart_bench.skip import require
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, HardwareMapper, ModelShape, Placement, Pool
from rollart_core.contracts.inference import GenerateRequest, GenerateResult, WeightSwap
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import RollartError
from rollart_core.inference.router import Router
from rollart_core.plugins.registry import build
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeDependencies, EpisodeLimits, run_episode
from rollart_core.scheduling.buffer import Buffer
from rollart_core.scheduling.controller import BatchRecord, Controller, ControllerDependencies
from rollart_core.scheduling.events import (
    AbortEpisode,
    DropGroup,
    LoseTicket,
    RunStarted,
    SchedulePolicy,
    StopRun,
)
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.task_mix import TaskMix, WeightedSource
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Group, Message, Observation, Sample, Ticket, Trajectory
from rollart_planner.cluster import Cluster
from rollart_planner.solve import expect
from rollart_testing.modelled_engine import TOKEN, ModelledEngine

TAKES: Final = ("seconds", "seeds", "faster", "short")

MARK = 1.3
CLOSE = 0.1
"""How far a measured rate may be from the expected rate of the plan."""
MODEL = ModelShape(8_030_000_000, 32, 32, 8, 128)
ENVS: Mapping[str, Workload] = {
    "read/Documents": Workload(prefill_tokens=3000, decode_tokens=16, turns=4, env_s=0.02),
    "read/Tables": Workload(prefill_tokens=1800, decode_tokens=24, turns=5, env_s=0.02),
    "write/Proofs": Workload(prefill_tokens=200, decode_tokens=1200, turns=2, env_s=0.02),
    "write/Programs": Workload(prefill_tokens=400, decode_tokens=800, turns=3, env_s=0.02),
}
WEIGHTS: Mapping[str, float] = {
    "read/Documents": 1.0,
    "read/Tables": 1.0,
    "write/Proofs": 2.0,
    "write/Programs": 2.0,
}
FASTER = 2.0
"""Devices are faster than real ones by this factor, so waits are shorter. A larger factor needs a
faster machine."""
NUM_ENGINES, MAX_CONCURRENT, GROUP_SIZE = 2, 128, 2
WARM_SHARE = 1 / 2
"""Share of the time in which nothing is counted, because all episodes begin together."""
ENGINE_POOLS = ("arithmetic", "bandwidth")
HANGS_S = 60.0
"""A placement hangs if no episode ends for this long, and for 20 times the requested seconds."""
VARIES = 0.5
"""Answers are up to this share longer or shorter than the workload's."""


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: 4 seconds, one seed; ``seconds`` (90): the minimum duration; ``seeds``
            (3) of `random`; ``faster`` (2): devices are faster than real ones by this factor.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        RollartError: If a placement finishes no episode in many times the seconds.
    """
    asked = Options("affinity", options)
    require("scipy", extra="plan")
    seconds = asked.number("seconds", 4 if asked.short else 90)
    seeds = asked.integer("seeds", 1 if asked.short else 3)
    cluster = pools(asked.number("faster", 4 * FASTER if asked.short else FASTER))
    sides = placements(cluster, seeds)
    expected = {name: expected_rate(side, cluster) for name, side in sides.items()}
    for name, rate in expected.items():
        echo(f"{name}: {rate:.2f} trajectories/s expected")
    measured, late_ms = asyncio.run(_measure_all(sides, cluster, seconds))
    for name, rate in measured.items():
        echo(f"{name}: {rate:.2f} trajectories/s measured, {rate / expected[name]:.2f} of expected")
    conditions = {"late_ms": round(late_ms, 2)}
    return result("affinity", _rows(measured, expected), conditions=conditions)


def pools(faster: float) -> list[Pool]:
    """Return the cluster, with devices that are faster than real ones by the factor."""
    described = Cluster.model_validate(
        {
            "pools": [
                {"name": "arithmetic", "device": "H100", "count": NUM_ENGINES},
                {"name": "bandwidth", "device": "H20", "count": NUM_ENGINES},
                {"name": "cores", "device": "cpu", "count": 256},
                {"name": "training", "device": "B200", "count": 64, "roles": ["trainer"]},
            ]
        }
    )
    return [
        replace(
            pool,
            flops_per_s=pool.flops_per_s * faster,
            bytes_per_s=pool.bytes_per_s * faster,
            step_s=pool.step_s / faster,
        )
        for pool in described.to_pools()
    ]


def demand() -> Demand:
    """Return the demand of the run. The trainer never limits the rate."""
    return Demand(model=MODEL, weights=WEIGHTS, max_concurrent=MAX_CONCURRENT, num_trainer_ranks=64)


def placements(cluster: Sequence[Pool], num_seeds: int) -> dict[str, Placement]:
    """Return the placements to compare. Envs and trainer are placed as `affinity` places them.

    `colocate` puts everything on the first pool of the cluster file. Each of the pools is tried as
    the first one.
    """
    kinds = [pool for pool in cluster if pool.name in ENGINE_POOLS]
    affinity = _place("affinity", {}, cluster)
    found = {"affinity": affinity}
    for order in (kinds, kinds[::-1]):
        found[f"colocate on {order[0].name}"] = _place("colocate", {}, order)
    for seed in range(num_seeds):
        found[f"random, seed {seed}"] = _place("random", {"seed": seed}, cluster)
    even = dict.fromkeys((pool.name for pool in kinds), 1 / len(kinds))
    found["even spread"] = replace(affinity, engines=dict.fromkeys(ENVS, even))
    return {
        name: replace(placement, envs=affinity.envs, trainer=affinity.trainer)
        for name, placement in found.items()
    }


def expected_rate(placement: Placement, cluster: Sequence[Pool]) -> float:
    """Return what ``rollart plan`` expects of a placement."""
    return expect(placement, ENVS, cluster, demand()).trajectories_per_s


def _place(mapper: str, options: Mapping[str, object], cluster: Sequence[Pool]) -> Placement:
    built: HardwareMapper = build("hardware_mappers", mapper, options)
    built.demand = demand()
    return built.place(ENVS, cluster)


def _rows(measured: Mapping[str, float], expected: Mapping[str, float]) -> list[dict[str, object]]:
    ours = measured["affinity"]
    colocate = max(rate for name, rate in measured.items() if name.startswith("colocate"))
    random = [rate for name, rate in measured.items() if name.startswith("random")]
    unit = "trajectories/s"
    off = {name: measured[name] / expected[name] for name in measured}
    worst = max(off.values(), key=lambda share: abs(share - 1))
    close = f"within {CLOSE:.0%}"
    return [
        row("affinity and the better colocation", ours, colocate, "mapper: colocate", unit,
            ratios=[ours / colocate], mark=MARK),
        row(f"affinity and random, mean of {len(random)} seeds", ours, mean(random),
            "mapper: random", unit, ratios=[ours / rate for rate in random], mark=MARK,
            meets_mark=ours / mean(random) >= MARK),
        row("affinity and every env spread evenly", ours, measured["even spread"], "even shares",
            unit, ratios=[ours / measured["even spread"]]),
        row("affinity, measured and expected", ours, expected["affinity"], "rollart plan", unit,
            ratios=[off["affinity"]], mark=close, meets_mark=abs(off["affinity"] - 1) <= CLOSE),
        row(f"all {len(off)} placements, measured by expected: the one furthest off", worst,
            median(off.values()), "median", "share", ratios=list(off.values())),
    ]  # fmt: skip


# One side


@dataclass(slots=True)
class _Count:
    """A recorder that only counts."""

    ended_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def ended_since(self, at_s: float) -> bool:
        """Return whether an episode ended after a time."""
        return bool(self.ended_s) and self.ended_s[-1] >= at_s

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """Record nothing."""

    def ended(self, trajectory: Trajectory) -> None:
        """Record when it finished."""
        if trajectory.failure is not None:
            self.failures.append(trajectory.failure.message)
        else:
            self.ended_s.append(time.perf_counter())

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """Record nothing."""

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """Record nothing."""

    async def batch_trained(self, record: BatchRecord) -> None:
        """Record nothing."""

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """Record nothing."""


class TokensEnv:
    """An environment with the number of tokens and turns of its workload."""

    def __init__(self, *, name: str) -> None:
        self._workload = ENVS[name]
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin."""
        self._turn = 0
        return str(int(self._workload.prefill_tokens)), {}

    async def astep(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Wait for the workload's reset time."""
        await asyncio.sleep(self._workload.env_s)
        self._turn += 1
        over = self._turn >= self._workload.turns
        return str(int(self._workload.prefill_tokens)), 0.0, over, False, {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Return immediately; the worker calls ``astep``."""
        raise NotImplementedError

    def close(self) -> None:
        """Free nothing."""


class _CountedRow(Conversation):
    """A row whose tokens are only counted. An observation holds the number of its tokens."""

    def __init__(self) -> None:
        self._row = array("i")
        self.parsed = None

    @property
    def newest(self) -> Message:
        return Message(role="assistant", content="")

    def turn_limit(self, max_new_tokens: int = 0) -> int:
        return max_new_tokens

    def observe(self, observation: Observation) -> None:
        self._row.extend([TOKEN] * int(str(observation)))

    def record(self, result: GenerateResult, *, turn: int | None = None) -> str:
        self._row.extend(result.token_ids)
        return ""

    def samples(self) -> tuple[Sample, ...]:
        return ()


async def _measure_all(
    sides: Mapping[str, Placement], cluster: Sequence[Pool], seconds: float
) -> tuple[dict[str, float], float]:
    """Return the rate of each concurrent side, and the mean delay of wake-ups in ms."""
    watch = asyncio.create_task(_lateness_ms(seconds))
    rates = await asyncio.gather(*(_measure(side, cluster, seconds) for side in sides.values()))
    return dict(zip(sides, rates, strict=True)), await watch


async def _lateness_ms(seconds: float) -> float:
    """Return the mean delay of sleeps, which the machine adds to the modelled time."""
    loop = asyncio.get_running_loop()
    ends_s, late = loop.time() + seconds, []
    while (began := loop.time()) < ends_s:
        await asyncio.sleep(0.05)
        late.append(loop.time() - began - 0.05)
    return 1e3 * mean(late)


async def _measure(placement: Placement, cluster: Sequence[Pool], seconds: float) -> float:
    """Return trajectories/s with a placement, without the beginning."""
    engines = [
        ModelledEngine(MODEL, pool, num_new=_length)
        for pool in cluster
        if pool.name in ENGINE_POOLS
        for _ in range(pool.count)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    router = Router(engines)
    router.place(placement)
    workers = EnvPool(_start_worker, num_workers=1)
    await workers.start()
    count = _Count()
    began_s = time.perf_counter()
    counted_from_s = began_s + seconds * WARM_SHARE
    controller = _controller(router, workers, count)
    stopping = asyncio.create_task(_stop(controller, count, counted_from_s, began_s + seconds))
    try:
        await controller.run(RunStarted())
        ended_s = await stopping
    finally:
        stopping.cancel()
        await router.close()
        await workers.close()
        await asyncio.gather(*(engine.close() for engine in engines))
    if count.failures:
        raise RollartError(f"{len(count.failures)} episodes failed: {count.failures[0]}")
    num = sum(counted_from_s <= at < ended_s for at in count.ended_s)
    return num / (ended_s - counted_from_s)


async def _stop(
    controller: Controller, count: _Count, counted_from_s: float, ends_s: float
) -> float:
    """Stop at a time, but not before a counted episode has ended. Return the end time.

    Raises:
        RollartError: If none ends.
    """
    hangs_s = counted_from_s + max(HANGS_S, 20 * (ends_s - counted_from_s))
    while (now_s := time.perf_counter()) < ends_s or not count.ended_since(counted_from_s):
        if count.failures:
            break
        if now_s > hangs_s:
            error = RollartError("no episode ended: is the machine busy, or ``seconds`` too few?")
            controller.fail(error)
            raise error
        await asyncio.sleep(0.05)
    controller.request_stop("measured")
    return now_s


async def _start_worker() -> LocalWorker:
    return LocalWorker(EnvWorker())


def _controller(router: Router, workers: EnvPool, count: _Count) -> Controller:
    parts = {env_id: _episode_parts(env_id, router, workers) for env_id in ENVS}

    async def episode(ticket: Ticket, version: int) -> Trajectory:
        return await run_episode(ticket, version, parts[ticket.task.env_id])

    sources = [WeightedSource(TaskSource(e, "train", None, 0), WEIGHTS[e]) for e in ENVS]
    policy = SchedulePolicy(
        groups_per_batch=1,
        group_size=GROUP_SIZE,
        max_concurrent=MAX_CONCURRENT,
        max_staleness=1_000_000,
    )
    return Controller(
        ControllerDependencies(
            scheduler=Scheduler(policy, TaskMix(sources, 0)),
            buffer=Buffer(GROUP_SIZE, 1_000_000),
            run_episode=episode,
            trainer=NoTrainer(),
            engines=router,
            keep_group=lambda group: True,
            recorder=count,
        ),
        ticket_s=600.0,
        wall_s=None,
    )


def _episode_parts(env_id: str, router: Router, workers: EnvPool) -> EpisodeDependencies:
    workload = ENVS[env_id]
    return EpisodeDependencies(
        env=EnvRef(f"{__name__}:TokensEnv", {"name": env_id}),
        envs=workers,
        engine=router,
        new_conversation=_CountedRow,
        score=_score,
        stop_token_ids=(),
        limits=EpisodeLimits(
            max_turns=100,
            max_new_tokens=int(2 * workload.decode_tokens),
            temperature=1.0,
            timeouts=PhaseTimeouts(60.0, 60.0),
            generate_s=300.0,
            episode_s=500.0,
        ),
        seed=0,
    )


async def _score(request: RewardRequest) -> RewardResult:
    return RewardResult(0.0)


def _length(request: GenerateRequest) -> int:
    """Return a length near the workload's, the same for the same turn of a ticket."""
    middle = ENVS[request.env_id].decode_tokens
    draw = Random(request.sampling_key).uniform(1 - VARIES, 1 + VARIES)
    return round(middle * draw)
