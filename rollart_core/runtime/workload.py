"""What environments ask of the hardware: declared by their specs, then measured as a run goes on.

    turn i:  i (p + d) tokens in the KV cache  ->  + p tokens of prefill  ->  + d tokens of decode

Takes: declared workloads, finished trajectories. Gives: measured workloads, and whether one has
left what the plan was made with. Never: reads a clock, or counts an episode that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollart_core.contracts.env import Workload
from rollart_core.types import Trajectory

FIELDS = ("prefill_tokens", "decode_tokens", "turns", "env_s", "reward_s")
NEGLIGIBLE: Mapping[str, float] = {
    "prefill_tokens": 8.0,
    "decode_tokens": 4.0,
    "turns": 0.5,
    "env_s": 0.01,
    "reward_s": 0.01,
}
"""Differences up to this change no plan, by whatever factor: 1 ms is not 10 times 0.1 ms."""


def total_tokens(workload: Workload) -> float:
    """Return the tokens of a whole trajectory."""
    return workload.turns * (workload.prefill_tokens + workload.decode_tokens)


def cached_tokens(workload: Workload) -> float:
    """Return how many tokens are in the cache when a turn begins, in the mean over turns."""
    return (workload.turns - 1) / 2 * (workload.prefill_tokens + workload.decode_tokens)


def decode_context(workload: Workload) -> float:
    """Return the length of the row a decoded token attends to, in the mean over tokens."""
    return cached_tokens(workload) + workload.prefill_tokens + workload.decode_tokens / 2


def held_tokens(workload: Workload) -> float:
    """Return the tokens a running turn holds in the cache at its end, in the mean over turns."""
    return cached_tokens(workload) + workload.prefill_tokens + workload.decode_tokens


def of_trajectory(trajectory: Trajectory) -> Workload | None:
    """Return what one trajectory asked; None when it has no turn.

    Reward seconds are not recorded by trajectory and stay 0.
    """
    turns = trajectory.turns
    if not turns:
        return None
    num_decoded = sum(turn.num_new_tokens for turn in turns)
    row = turns[-1].num_prompt_tokens + turns[-1].num_new_tokens
    return Workload(
        prefill_tokens=max(0, row - num_decoded) / len(turns),
        decode_tokens=num_decoded / len(turns),
        turns=float(len(turns)),
        env_s=sum(turn.step_s for turn in turns) / len(turns),
    )


@dataclass(slots=True)
class WorkloadMeter:
    """An exponential mean over the trajectories of one environment.

    The first ``1 / (1 - decay)`` count alike, so that what came first does not weigh too much.
    Means of tokens and env seconds a turn are weighted by turns, as the hardware sees them.
    """

    declared: Workload
    decay: float = 0.98
    count: int = 0
    """Trajectories seen."""
    _turns: float = 0.0
    _prefill: float = 0.0
    _decode: float = 0.0
    _env_s: float = 0.0
    """Each a trajectory."""

    def add(self, trajectory: Trajectory) -> None:
        """Take a finished trajectory; one that failed or has no turn is left out."""
        seen = None if trajectory.failure else of_trajectory(trajectory)
        if seen is None:
            return
        self.count += 1
        share = max(1 / self.count, 1 - self.decay)
        self._turns += share * (seen.turns - self._turns)
        self._prefill += share * (seen.prefill_tokens * seen.turns - self._prefill)
        self._decode += share * (seen.decode_tokens * seen.turns - self._decode)
        self._env_s += share * (seen.env_s * seen.turns - self._env_s)

    @property
    def measured(self) -> Workload:
        """What was measured; as declared before there was anything."""
        if not self.count:
            return self.declared
        return replace(
            self.declared,
            prefill_tokens=self._prefill / self._turns,
            decode_tokens=self._decode / self._turns,
            turns=self._turns,
            env_s=self._env_s / self._turns,
        )


def departures(planned: Workload, measured: Workload, factor: float) -> list[str]:
    """Return in what ``measured`` has left ``planned`` by more than ``factor``, a phrase each."""
    found = []
    for name in FIELDS:
        was, now = getattr(planned, name), getattr(measured, name)
        if abs(now - was) > NEGLIGIBLE[name] and max(was, now) > factor * min(was, now):
            found.append(f"{name} {now:.4g} instead of {was:.4g}")
    return found
