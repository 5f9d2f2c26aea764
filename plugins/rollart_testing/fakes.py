"""Small fakes: reward, algorithm, weight channel, tracker, hardware mapper.

Takes: plain options. Gives: the least that keeps each contract, plus a record of what was asked.
Never: imports torch (tensors are handed in), does I/O, or draws at random.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.tracker import Tracker
from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.types import FloatArray, Group

if TYPE_CHECKING:
    import torch


class FakeReward(Reward):
    """Answers the return of the environment, or always ``value``.

    Args:
        value: What to answer; None answers ``env_return``. NaN is a way to misbehave.
        error: A message to raise with instead of answering.
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
    """Ranks the members by the return of the environment: the best gets 1, the worst 0."""

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members; equal returns get equal ranks."""
        steps = sorted({request.env_return for request in requests})
        top = max(len(steps) - 1, 1)
        return [RewardResult(steps.index(request.env_return) / top) for request in requests]


class FakeAlgorithm(Algorithm):
    """Plain policy gradient with the mean reward of the group as baseline.

    Args:
        requires: The signals to ask for.
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
        keep: How many of the newest versions can be fetched.
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
        """Copy the tensors and drop versions that are too old."""
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
        """Forget everything, if this end published it; may be called twice."""
        self._closed = True
        if self._published:
            self._stores.pop(self._location, None)


class FakeTracker(Tracker):
    """Records what it is told.

    Args:
        fail_at: The train_step whose ``log`` raises; None for never.
    """

    def __init__(self, *, fail_at: int | None = None) -> None:
        self._fail_at = fail_at
        self.run_dir: Path | None = None
        self.config: Mapping[str, object] = {}
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        """(train_step, policy_version, metrics) of each ``log``."""
        self.num_closes = 0

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Remember where and with what."""
        self.run_dir, self.config = run_dir, config

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Keep one row."""
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
        """Place all on the one pool."""
        fitting = [p.name for p in pools if p.count > 0 and self._pool in (None, p.name)]
        if not fitting:
            raise ValueError(f"no pool {self._pool or ''} among {[p.name for p in pools]}")
        name = fitting[0]
        return Placement(
            envs=dict.fromkeys(workloads, name),
            engines={env_id: {name: 1.0} for env_id in workloads},
            trainer=name,
            reasons=(f"everything goes to {name}, for it is a fake",),
        )
