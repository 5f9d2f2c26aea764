"""`rollart bench batches`: the transfer of a batch from the controller to the trainer's ranks.

The batch has 64 groups of 8 long trajectories. It goes to 32 ranks; they share one process, which
answers each call as the process of a rank does. Ours stores the batch once, and each call contains
a reference. The peer sends the whole batch in each call, which is pickled on the event loop.

A task measures the lag of the loop meanwhile: how much later than asked for it runs again.

Takes: ``pairs``, ``short`` (a small batch, 4 ranks). Gives: rows. Never: trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_core.runtime.frames import Call, encode
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.records import StoredRecords, StoreRecords, file_store
from rollart_core.runtime.remote import OPEN_STORE, TrainerGroup
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory, Turn

TAKES: Final = ("pairs", "short")
NUM_RANKS, NUM_GROUPS, GROUP_SIZE = 32, 64, 8
NUM_TOKENS: Final = 16_384
"""Tokens of a trajectory."""
NUM_CHARS: Final = 3 * NUM_TOKENS
"""Text of a trajectory, in its turns."""
MOST_BYTES, MOST_LAG_S = 1_000_000, 0.05
LOOK_S = 0.001


class Ranks:
    """The object of a process that acts as several ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def train_batch(
        self, groups: Sequence[Group], policy_version: int, *, rank: int, progress: float | None
    ) -> list[TrainStepReport]:
        """Read the rows of a rank, and the loss masks of all."""
        samples = [s for g in groups for s in g.samples]
        total = sum(int(s.token_ids.sum(dtype=np.int64)) for s in samples[rank :: self._num_ranks])
        num_loss_tokens = sum(s.num_loss_tokens for s in samples)
        metrics = {"sum": float(total), "loss_tokens": float(num_loss_tokens)}
        return [TrainStepReport(1, policy_version, metrics)]


class RankWorker:
    """The worker of a rank, which shares a process with others."""

    def __init__(self, rank: int, process: WorkerProcess) -> None:
        self.name = f"trainer-{rank}"
        self.on_death: Callable[[Any], None] | None = None
        self.alive = True
        self.calls: list[Call] = []
        self._rank, self._process = rank, process

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Do nothing: the object exists."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the process, as this rank."""
        if method in (OPEN_STORE, "__build__"):
            return "127.0.0.1:1"
        if method == "close":
            return None
        self.calls.append(Call(0, method, args, kwargs))
        return await self._process.call(method, *args, rank=self._rank, **kwargs)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End it; the process continues."""
        self.alive = False

    def kill(self) -> None:
        """End it; the process continues."""
        self.alive = False


@dataclass(frozen=True, slots=True)
class _InFrame(StoredRecords):
    """The peer: the records are a part of each frame."""

    records: list[Any]

    def load(self) -> list[Any]:
        return self.records


@contextlib.asynccontextmanager
async def _in_frames(records: Sequence[Any]) -> AsyncIterator[StoredRecords]:
    yield _InFrame(list(records))


@dataclass(frozen=True, slots=True)
class _Figures:
    wall_s: float
    lag_s: float
    num_bytes: int
    reports: list[TrainStepReport]


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``pairs`` and ``short``.
    """
    given = Options("batches", options)
    short = given.flag("short")
    pairs = given.integer("pairs", 1 if short else 3)
    num_ranks = 4 if short else NUM_RANKS
    groups = make_groups(4 if short else NUM_GROUPS, 256 if short else NUM_TOKENS)
    ours, peers = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for pair in range(pairs):
            ours.append(asyncio.run(_once(groups, num_ranks, file_store(Path(name)))))
            peers.append(asyncio.run(_once(groups, num_ranks, _in_frames)))
            if ours[-1].reports != peers[-1].reports:
                raise AssertionError("the ranks did not read the same batch")
            echo(f"pair {pair + 1}: ours {ours[-1].wall_s:.2f} s, peer {peers[-1].wall_s:.2f} s")
    return result("batches", _rows(ours, peers, f"{num_ranks} ranks"))


def _rows(ours: list[_Figures], peers: list[_Figures], case: str) -> list[dict[str, object]]:
    peer, pairs = "a pickle for each rank", list(zip(ours, peers, strict=True))
    sent, lag_s = max(f.num_bytes for f in ours), max(f.lag_s for f in ours)
    return [
        row(
            f"{case}: bytes through the controller",
            sent,
            max(f.num_bytes for f in peers),
            peer,
            "bytes",
            ratios=[p.num_bytes / o.num_bytes for o, p in pairs],
            mark=f"at most {MOST_BYTES}",
            meets_mark=sent <= MOST_BYTES,
            required=True,
        ),
        row(
            f"{case}: largest lag of the event loop",
            lag_s,
            max(f.lag_s for f in peers),
            peer,
            "s",
            ratios=[p.lag_s / o.lag_s for o, p in pairs],
            mark=f"at most {MOST_LAG_S}",
            meets_mark=lag_s <= MOST_LAG_S,
        ),
        row(
            f"{case}: until all ranks have read it",
            max(f.wall_s for f in ours),
            max(f.wall_s for f in peers),
            peer,
            "s",
            ratios=[p.wall_s / o.wall_s for o, p in pairs],
        ),
    ]


async def _once(groups: list[Group], num_ranks: int, store: StoreRecords) -> _Figures:
    process = WorkerProcess("ranks")
    workers = [RankWorker(rank, process) for rank in range(num_ranks)]
    group = TrainerGroup(workers.__getitem__, num_ranks, {}, store=store)
    try:
        await process.start(f"{__name__}:Ranks", {"num_ranks": num_ranks})
        await group.start()
        async with _lag() as lag:
            began = time.perf_counter()
            reports = await group.train_batch(groups, 0)
            wall_s = time.perf_counter() - began
        return _Figures(wall_s, max(lag), sum(len(encode(w.calls[0])) for w in workers), reports)
    finally:
        await group.close()
        await process.close()


@contextlib.asynccontextmanager
async def _lag() -> AsyncIterator[list[float]]:
    """Measure how much later than asked for the event loop runs a task, in seconds."""
    lags = [1e-9]

    async def look() -> None:
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            lags.append(time.perf_counter() - due)

    looking = asyncio.create_task(look())
    try:
        yield lags
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def make_groups(num_groups: int, num_tokens: int) -> list[Group]:
    """Return groups of random long trajectories."""
    rng = np.random.default_rng(0)
    groups = []
    for g in range(num_groups):
        task, name = Task("long", "train", g, g), f"{g:05d}"
        members = [
            _trajectory(Ticket(f"{name}.{i}", task, name, i), num_tokens, rng)
            for i in range(GROUP_SIZE)
        ]
        groups.append(Group(name, task, tuple(members), GROUP_SIZE))
    return groups


def _trajectory(ticket: Ticket, num_tokens: int, rng: np.random.Generator) -> Trajectory:
    mask = rng.random(num_tokens) < 0.5
    mask[0] = False
    versions = np.where(mask, 0, -1).astype(np.int32)
    sample = Sample(
        rng.integers(0, 150_000, num_tokens, dtype=np.int32),
        mask,
        np.where(mask, rng.random(num_tokens, dtype=np.float32) - 1, 0).astype(np.float32),
        versions,
        versions,
    )
    text = "x" * (NUM_CHARS * num_tokens // NUM_TOKENS)
    turn = Turn(text, "done", num_tokens, int(mask.sum()), "stop", 1.0, 0.0, 0.0)
    return Trajectory(ticket, "finished", (sample,), (turn,), reward=1.0, score=1.0)
