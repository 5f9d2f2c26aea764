"""`rollart bench env`: rollouts per second of a 5-turn echo, in RollArt and in bare loops.

    ours:   controller -> episode -> engine that answers immediately -> env worker -> echo
                             |-> trajectory: tokens, logprobs, turns, reward -> journal
    peers:  reset, step, step, step, step, step   (gymnasium, gem, skyrl-gym; nothing is recorded)

Everything runs in this process. An environment with ``astep`` is awaited; the same one without it
is called on a thread, as RollArt calls every environment that may block. The sides alternate.

The second part measures a step alone: through the env worker (deadline, cancellation, checks of the
result), and only the checks, compared with a step of ``gymnasium.make``.

Takes: ``rounds``, ``rollouts``, ``short``. Gives: rollouts per second of time and of CPU time, and
the cost of a step in CPU time. A peer that is not installed is a skipped case. Never: counts a
rollout that is not in the journal as a whole.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rollart_bench import echo as echoes
from rollart_bench.echo import FIRST, SAYS, TURNS, Player
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.scale import dependencies, local_pool
from rollart_bench.sides import NoTrainer
from rollart_bench.skip import require
from rollart_core.config.model import NewModel
from rollart_core.contracts.inference import WeightSwap
from rollart_core.errors import RollartError, first_line
from rollart_core.inference.router import Router
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.rollout.env_answers import observed
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeDependencies, run_episode
from rollart_core.runtime.garbage_collection import short_gc_pauses
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
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import JournalReader
from rollart_core.types import Group, Ticket, Trajectory
from rollart_testing.engine import ScriptedEngine

TAKES: Final = ("rounds", "rollouts", "short")

MARK_RATE: Final = 0.07
"""The target for the ratio to gymnasium's rollouts/s."""
MARK_STEPS: Final = 7
"""The target for the overhead of a step, in steps of gymnasium."""
ENVS: Final = {
    "astep": "rollart_bench.echo:AsyncEchoEnv",
    "step on a thread": "rollart_bench.echo:EchoEnv",
}
GYMNASIUM: Final = "gymnasium.make"
PEERS: Final[Mapping[str, Callable[[], Player]]] = {
    GYMNASIUM: lambda: echoes.stepped(echoes.made()),
    "the class without wrappers": lambda: echoes.stepped(echoes.EchoEnv()),
    "gem": echoes.gem,
    "skyrl-gym": echoes.skyrl_gym,
}
PACKAGES: Final = {"gem": "gem-llm", "skyrl-gym": "skyrl-gym"}
PEER_ROLLOUTS: Final = 64
"""Rollouts of a peer for each of ours, so that both sides are measured for about as long."""
GROUP_SIZE: Final = 8
GROUPS: Final = 8
"""Groups per batch, and at once."""
MODEL: Final = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one side in one round."""

    per_s: float
    per_cpu_s: float


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``rounds`` (9), ``rollouts`` of ours per round (1,280), or ``short``: one round of
            128.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("env", options)
    require("tokenizers", extra="train")
    rounds = asked.integer("rounds", 1 if asked.short else 9)
    num_rollouts = asked.integer("rollouts", 128 if asked.short else 1280)
    players, skipped = _players()
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as folder:
        corpus = [FIRST, SAYS] * 20
        path = str(new_model(Path(folder) / "model", MODEL, corpus, seed=0))
        tokenizer = load_tokenizer(path)
        got: dict[str, list[Rate]] = {side: [] for side in (*ENVS, *players)}
        for number in range(rounds + 1):  # the first round fills the caches and is not counted
            for side, rates in got.items():
                if side in ENVS:
                    rate = asyncio.run(_recorded(ENVS[side], num_rollouts, tokenizer))
                else:
                    rate = _looped(side, players[side], PEER_ROLLOUTS * num_rollouts)
                if number:
                    rates.append(rate)
                    echo(f"round {number} of {rounds}: {side}: {rate.per_s:.0f} rollouts/s")
    steps = [asyncio.run(step_costs(TURNS * num_rollouts)) for _ in range(rounds)]
    return result("env", [*_rows(got), *_step_rows(steps)], skipped_cases=skipped)


def _players() -> tuple[dict[str, Player], dict[str, str]]:
    """Return the players of the peers, and why the others are skipped."""
    players, skipped = {}, {}
    for peer, player in PEERS.items():
        try:
            players[peer] = player()
        except ImportError as e:
            package = PACKAGES.get(peer, peer)
            skipped[peer] = (
                f"{package} is not installed: pip install {package} ({first_line(str(e))})"
            )
    return players, skipped


def _rows(got: Mapping[str, list[Rate]]) -> list[dict[str, object]]:
    rows = []
    for side in ENVS:
        for peer in (peer for peer in got if peer not in ENVS):
            case = f"{TURNS}-turn echo, recorded, {side}; {peer}"
            rows.append(_rate_row(case, got[side], got[peer], peer, of_cpu=False))
            if peer == GYMNASIUM:
                rows.append(_rate_row(f"{case}, CPU", got[side], got[peer], peer, of_cpu=True))
    return rows


def _rate_row(
    case: str, ours: Sequence[Rate], theirs: Sequence[Rate], peer: str, *, of_cpu: bool
) -> dict[str, object]:
    pairs = [
        (a.per_cpu_s, b.per_cpu_s) if of_cpu else (a.per_s, b.per_s)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return row(
        case,
        median(a for a, _ in pairs),
        median(b for _, b in pairs),
        peer,
        "rollouts/s of CPU time" if of_cpu else "rollouts/s",
        ratios=[a / b for a, b in pairs],
        mark=MARK_RATE if peer == GYMNASIUM else None,
    )


def _step_rows(costs: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    rows = []
    for case in (case for case in costs[0] if case != GYMNASIUM):
        ratios = [cost[case] / cost[GYMNASIUM] for cost in costs]
        is_marked = case in ENVS
        rows.append(
            row(
                f"a step through the env worker, {case}" if is_marked else case,
                median(cost[case] for cost in costs),
                median(cost[GYMNASIUM] for cost in costs),
                GYMNASIUM,
                "us of CPU time (ratio: ours over theirs)",
                ratios=ratios,
                mark=f"at most {MARK_STEPS} steps more" if is_marked else None,
                meets_mark=median(ratios) - 1 <= MARK_STEPS if is_marked else None,
            )
        )
    return rows


def _looped(peer: str, play: Player, num_rollouts: int) -> Rate:
    """Play a peer's rollouts.

    Raises:
        RollartError: If they are not the echo's.
    """
    if abs(play(0) - 1) > 1e-9:
        raise RollartError(f"{peer}: the return of the echo is {play(0)}, not 1")
    began, cpu_s = time.perf_counter(), time.process_time()
    for seed in range(num_rollouts):
        play(seed)
    return _rate(num_rollouts, began, cpu_s)


def _rate(num_rollouts: int, began: float, cpu_s: float) -> Rate:
    wall_s = time.perf_counter() - began
    return Rate(num_rollouts / wall_s, num_rollouts / (time.process_time() - cpu_s))


class _Recorder:
    """Writes the journal, and counts the rollouts in it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.num_rollouts = 0

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        self._journal.dispatched(ticket, start_version)

    def ended(self, trajectory: Trajectory) -> None:
        self._journal.trajectory(trajectory)
        self.num_rollouts += 1

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        self._journal.decided(action)

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        self._journal.batch_taken(groups, policy_version)

    async def batch_trained(self, record: BatchRecord) -> None:
        self._journal.batch_trained(record.policy_version)

    def swapped(self, swaps: Sequence[WeightSwap]) -> None:
        """Record nothing: the engine has no weights."""


async def _recorded(env: str, num_rollouts: int, tokenizer: ChatTokenizer) -> Rate:
    """Play our rollouts: a run without a model and a trainer."""
    says = tokenizer.encode(SAYS)
    engine = ScriptedEngine(lambda request: says, record=False)
    await engine.start()
    envs = await local_pool()
    deps = dependencies(EnvRef(env), envs, engine, tokenizer, max_turns=TURNS)
    num_batches = max(1, round(num_rollouts / (GROUPS * GROUP_SIZE)))
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as folder, short_gc_pauses():
        began, cpu_s = time.perf_counter(), time.process_time()
        journal = Journal(Path(folder), {})
        recorder = _Recorder(journal)
        try:
            controller = _controller(recorder, deps, num_batches, Router([engine]))
            await controller.run(RunStarted())
        finally:
            journal.close()
        rate = _rate(recorder.num_rollouts, began, cpu_s)
        await envs.close()
        check_journal(Path(folder), recorder.num_rollouts)
    return rate


def check_journal(folder: Path, num_rollouts: int) -> None:
    """Read the rollouts back.

    Raises:
        RollartError: If one is missing or not a whole episode.
    """
    with JournalReader(folder) as journal:
        whole = [_is_whole(trajectory) for trajectory in journal.trajectories()]
    if not num_rollouts or sum(whole) != num_rollouts:
        raise RollartError(f"of {num_rollouts} rollouts, {sum(whole)} are complete in the journal")


def _is_whole(trajectory: Trajectory) -> bool:
    num_new = sum(turn.num_new_tokens for turn in trajectory.turns)
    return (
        trajectory.status == "finished"
        and len(trajectory.turns) == TURNS
        and len(trajectory.samples) == 1
        and trajectory.num_loss_tokens == num_new > 0
        and abs((trajectory.reward or 0.0) - 1) < 1e-9
    )


def _controller(
    recorder: _Recorder, deps: EpisodeDependencies, num_batches: int, engines: Router
) -> Controller:
    policy = SchedulePolicy(
        groups_per_batch=GROUPS,
        group_size=GROUP_SIZE,
        max_concurrent=GROUPS * GROUP_SIZE,
        max_staleness=2,
        num_batches=num_batches,
    )

    def play(ticket: Ticket, version: int) -> Awaitable[Trajectory]:
        return run_episode(ticket, version, deps)

    return Controller(
        ControllerDependencies(
            scheduler=Scheduler(policy, TaskSource(deps.env.id, "train", None, 0)),
            buffer=Buffer(GROUP_SIZE, 4 * GROUPS * GROUP_SIZE),
            run_episode=play,
            trainer=NoTrainer(),
            engines=engines,
            keep_group=lambda group: True,
            recorder=recorder,
        ),
        ticket_s=600,
        wall_s=None,
    )


async def step_costs(num_steps: int) -> dict[str, float]:
    """Return the CPU time of a step in microseconds, by case.

    Args:
        num_steps: The number of steps through the env worker; 10 times as many of the other cases.
    """
    num_fast = 10 * num_steps
    env = echoes.made(turns=num_fast + 1)
    env.reset(seed=0)
    began = time.process_time()
    for _ in range(num_fast):
        answer = env.step(SAYS)
    costs = {GYMNASIUM: _us(began, num_fast)}
    text, reward, *ends, info = answer
    began = time.process_time()
    for _ in range(num_fast):
        observed(text, reward, (ends[0], ends[1]), info, max_chars=20_000)
    costs["only the checks of a step's result"] = _us(began, num_fast)
    for case, name in ENVS.items():
        worker = EnvWorker()
        ref = EnvRef(name, {"turns": num_steps + 1})
        await worker.reset("e", ref, seed=0, options={}, timeout_s=60)
        began = time.process_time()
        for _ in range(num_steps):
            await worker.step("e", SAYS, timeout_s=60)
        costs[case] = _us(began, num_steps)
        await worker.shutdown()
    return costs


def _us(began: float, num_steps: int) -> float:
    return 1e6 * (time.process_time() - began) / num_steps
