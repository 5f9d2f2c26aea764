"""Small fakes: reward and its backend, algorithm, weight channel, tracker, mapper, sandbox.

Takes: plain options; for a backend, the shares of calls that fail in each way and an outage; for a
sandbox, commands as Python functions. Gives: minimal implementations of each contract that record
their calls. Never: imports torch (the caller passes tensors), does I/O, starts a process, or draws
without a seed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_core.contracts.reward import (
    GroupReward,
    Reward,
    RewardAnswer,
    RewardBackend,
    RewardCall,
    RewardCost,
    RewardRef,
    RewardRequest,
    RewardResult,
)
from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.contracts.tracker import Tracker
from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.errors import BackendFailure, RewardFailure, boundary
from rollart_core.plugins import registry
from rollart_core.types import FloatArray, Group

if TYPE_CHECKING:
    import torch

Files: TypeAlias = dict[str, bytes]
Command: TypeAlias = Callable[[Sequence[str], Files, bytes], ExecResult]
"""From (argv, files of the sandbox, stdin) to a result; ``wall_s`` is its duration."""


class FakeReward(Reward):
    """Returns the environment's return, or always ``value``.

    Args:
        value: The reward; None means ``env_return``. NaN is a fault to inject.
        error: Message of an error to raise instead.
        delay_s: Seconds to sleep first.
    """

    def __init__(
        self, *, value: float | None = None, error: str | None = None, delay_s: float = 0.0
    ) -> None:
        self._value = value
        self._error = error
        self._delay_s = delay_s
        self.requests: list[RewardRequest] = []

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode."""
        self.requests.append(request)
        time.sleep(self._delay_s)
        if self._error is not None:
            raise RuntimeError(self._error)
        value = request.env_return if self._value is None else self._value
        return RewardResult(value, {"fake": value})


class FakeGroupReward(GroupReward):
    """Ranks the members by the environment's return: the best gets 1, the worst 0."""

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members; equal returns get equal ranks."""
        steps = sorted({request.env_return for request in requests})
        top = max(len(steps) - 1, 1)
        return [RewardResult(steps.index(request.env_return) / top) for request in requests]


class FakeAlgorithm(Algorithm):
    """Plain policy gradient with the mean reward of the group as baseline.

    Args:
        requires: The required signals.
    """

    def __init__(self, *, requires: Sequence[str] = ()) -> None:
        self.requires = frozenset(requires)
        self.signals: list[frozenset[str]] = []

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return reward minus the group's mean on every sampled token."""
        self.signals.append(frozenset(signals))
        rows: list[FloatArray] = []
        for group in groups:
            rewards = [t.reward for t in group.trajectories if t.reward is not None]
            mean = float(np.mean(rewards)) if rewards else 0.0
            for trajectory in group.trajectories:
                advantage = np.float32((trajectory.reward or 0.0) - mean)
                rows += [sample.loss_mask * advantage for sample in trajectory.samples]
        return rows

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return minus the mean of advantage times logprob over loss tokens."""
        gain = (trainer_logprobs * batch.advantages * batch.loss_mask).sum()
        loss = -gain / max(batch.total_loss_tokens, 1)
        return loss, {"gain": gain.detach(), "logprob": trainer_logprobs.detach().sum()}


class FakeWeightChannel(WeightChannel):
    """Weights in the memory of this process, shared by all ends with one ``location``.

    Args:
        location: Name of the channel.
        keep: Number of the newest versions that can be fetched.
    """

    _stores: ClassVar[dict[str, dict[int, list[tuple[str, torch.Tensor]]]]] = {}

    def __init__(self, location: str = "memory", *, keep: int = 2) -> None:
        self._location = location
        self._keep = keep
        self._published = False
        self._closed = False

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Publication:
        """Copy the tensors and remove versions that are too old."""
        began = time.perf_counter()
        copies = [(name, tensor.detach().cpu().clone()) for name, tensor in tensors]
        store = self._stores.setdefault(self._location, {})
        self._published = True
        store[policy_version] = copies
        held = sorted(version for version in store if version <= policy_version)[-self._keep :]
        for other in set(store) - set(held):
            del store[other]
        num_bytes = sum(tensor.nbytes for _, tensor in copies)
        return Publication(policy_version, num_bytes, time.perf_counter() - began)

    def fetch(self, policy_version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Return copies of a version's tensors."""
        store = {} if self._closed else self._stores.get(self._location, {})
        if policy_version not in store:
            raise LookupError(f"version {policy_version} is not among {sorted(store)}")
        return [(name, tensor.clone()) for name, tensor in store[policy_version]]

    def newest(self) -> int | None:
        """Return the newest version."""
        return max(self._stores.get(self._location, {}), default=None)

    def close(self) -> None:
        """Remove all versions if this end published them; may be called twice."""
        self._closed = True
        if self._published:
            self._stores.pop(self._location, None)


class FakeTracker(Tracker):
    """Records its calls.

    Args:
        fail_at: The train_step whose ``log`` raises; None means never.
    """

    def __init__(self, *, fail_at: int | None = None) -> None:
        self._fail_at = fail_at
        self.run_dir: Path | None = None
        self.config: Mapping[str, object] = {}
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        """(train_step, policy_version, metrics) of each ``log``."""
        self.num_closes = 0

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Record the run directory and config."""
        self.run_dir, self.config = run_dir, config

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Record one row."""
        if train_step == self._fail_at:
            raise OSError(f"trouble on demand at train_step {train_step}")
        self.rows.append((train_step, policy_version, dict(metrics)))

    def close(self) -> None:
        """Count the call."""
        self.num_closes += 1


class FakeMapper(HardwareMapper):
    """Puts everything on one pool.

    Args:
        pool: Its name; None takes the first.
    """

    def __init__(self, *, pool: str | None = None) -> None:
        self._pool = pool

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Place everything on the pool."""
        fitting = [p.name for p in pools if p.count > 0 and self._pool in (None, p.name)]
        if not fitting:
            raise ValueError(f"no pool {self._pool or ''} among {[p.name for p in pools]}")
        name = fitting[0]
        return Placement(
            envs=dict.fromkeys(workloads, name),
            engines={env_id: {name: 1.0} for env_id in workloads},
            trainer=name,
            reasons=(f"everything goes to {name}, because this mapper is a fake",),
        )


class FaultyBackend(RewardBackend):
    """A reward backend with faults; a run can use it as ``rollart_testing:FaultyBackend``.

    Args:
        reward: The reward.
        reward_range: Ignored; the scoring component checks it.
        timeout_s: Ignored; it waits until it is cancelled.
        mean_s: Mean duration of a call in seconds.
        sigma: Sigma of the duration's logarithm; 0 makes all equal.
        errors: Share of calls that fail.
        hangs: Share of calls that never return.
        garbage: Share of calls with a malformed result.
        outage_s: Begin and end of an outage, in seconds after the first call; all calls in it fail.
        seed: Seed of the faults.
    """

    def __init__(
        self,
        reward: RewardRef,
        *,
        reward_range: tuple[float, float],
        timeout_s: float,
        mean_s: float = 0.0,
        sigma: float = 0.0,
        errors: float = 0.0,
        hangs: float = 0.0,
        garbage: float = 0.0,
        outage_s: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        self._reward = registry.build("rewards", reward.id, reward.options)
        self._mean_s, self._sigma = mean_s, sigma
        self._shares = {"error": errors, "hang": hangs, "garbage": garbage}
        self._outage_s = tuple(outage_s)
        self._random = random.Random(seed)
        self._began_s: float | None = None
        self.calls: list[RewardCall] = []
        """All requests."""
        self.num_now = self.num_most = 0
        """The number of calls in progress: now, and the maximum."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request."""
        with boundary(RewardFailure, "reward.score"):
            if isinstance(self._reward, GroupReward):
                return self._reward.score_group(requests)
            return [self._reward.score(request) for request in requests]

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call, or inject a fault.

        Raises:
            BackendFailure: If that is the fault.
        """
        self.calls.append(call)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await self._answer(call)
        finally:
            self.num_now -= 1

    def gauges(self) -> Mapping[str, float]:
        """Return the number of calls in progress."""
        return {"calls_now": float(self.num_now)}

    async def close(self) -> None:
        """Do nothing."""

    async def _answer(self, call: RewardCall) -> RewardAnswer:
        fault = self._fault()
        took_s = self._took_s()
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "error":
            raise BackendFailure("503: no instance is free")
        await asyncio.sleep(took_s)
        if fault == "garbage":
            raise BackendFailure("the answer is not JSON: '<html>'")
        cost = RewardCost(cold=len(self.calls) == 1, billed_gb_s=took_s, run_s=took_s)
        if call.group:
            return RewardAnswer(tuple(await self.score(call.requests)), cost)
        results = [await self._score_one(request) for request in call.requests]
        return RewardAnswer(tuple(results), cost)

    def _fault(self) -> str:
        """Return the fault of this call; empty if there is none."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        if self._outage_s and self._outage_s[0] <= now_s - self._began_s < self._outage_s[1]:
            return "error"
        drawn = self._random.random()
        for kind, share in self._shares.items():
            if drawn < share:
                return kind
            drawn -= share
        return ""

    def _took_s(self) -> float:
        if not self._mean_s or not self._sigma:
            return self._mean_s
        mu = math.log(self._mean_s) - self._sigma**2 / 2
        return self._random.lognormvariate(mu, self._sigma)


class FakeSandbox(Sandbox):
    """A sandbox with ``true``, ``false``, ``echo``, ``cat``, ``sleep`` and ``commands``.

    Args:
        commands: argv[0] -> function.
        files: The initial files of the sandbox.
    """

    def __init__(
        self,
        commands: Mapping[str, Command] | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._commands = {**_COMMANDS, **(commands or {})}
        self.files: Files = {_absolute(path): content for path, content in (files or {}).items()}
        self.calls: list[tuple[str, ...]] = []
        self.forwards: dict[str, str] = {}
        self._snapshots: dict[str, Files] = {}
        self._is_up = False

    async def start(self) -> None:
        """Start the sandbox."""
        self._is_up = True

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a scripted command; exit code 127 if there is none of that name."""
        self._check()
        self.calls.append(tuple(argv))
        command = self._commands.get(argv[0])
        if command is None:
            return ExecResult(127, b"", f"{argv[0]}: not found\n".encode())
        result = command(argv, self.files, stdin)
        if result.wall_s > timeout_s:
            return ExecResult(137, b"", b"", timed_out=True, wall_s=timeout_s)
        return _cut(result, max_output_bytes)

    async def read_file(self, path: str) -> bytes:
        """Return a file."""
        self._check()
        if _absolute(path) not in self.files:
            raise FileNotFoundError(path)
        return self.files[_absolute(path)]

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        self._check()
        self.files[_absolute(path)] = content

    async def snapshot(self) -> str:
        """Save the files."""
        self._check()
        name = f"snapshot-{len(self._snapshots)}"
        self._snapshots[name] = dict(self.files)
        return name

    async def restore(self, snapshot: str) -> None:
        """Restore the files."""
        self._check()
        if snapshot not in self._snapshots:
            raise LookupError(f"no snapshot {snapshot!r}; there are {sorted(self._snapshots)}")
        self.files.clear()
        self.files.update(self._snapshots[snapshot])

    async def forward(self, path: str, target: str) -> None:
        """Record the target of a path."""
        self._check()
        self.forwards[path] = target

    async def close(self) -> None:
        """Stop the sandbox; may be called twice."""
        self._is_up = False

    def _check(self) -> None:
        if not self._is_up:
            raise RuntimeError("the sandbox is not up: start() first, and not after close()")


def _absolute(path: str) -> str:
    return str(PurePosixPath("/", path))


def _cut(result: ExecResult, limit: int) -> ExecResult:
    truncated = len(result.stdout) > limit or len(result.stderr) > limit
    if not truncated:
        return result
    return replace(
        result, stdout=result.stdout[:limit], stderr=result.stderr[:limit], truncated=True
    )


def _echo(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, (" ".join(argv[1:]) + "\n").encode(), b"")


def _cat(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    missing = [path for path in argv[1:] if _absolute(path) not in files]
    if missing:
        return ExecResult(1, b"", f"cat: {missing[0]}: No such file or directory\n".encode())
    content = b"".join(files[_absolute(path)] for path in argv[1:]) if argv[1:] else stdin
    return ExecResult(0, content, b"")


def _sleep(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"", wall_s=float(argv[1]))


def _true(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"")


def _false(argv: Sequence[str], files: Files, stdin: bytes) -> ExecResult:
    return ExecResult(1, b"", b"")


_COMMANDS: dict[str, Command] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
}
