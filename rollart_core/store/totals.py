"""The sums of an RL phase: what was generated, what was trained and stands, what was undone.

Takes: trajectories, batches, the end of each life. Gives: what the report says of the phase. Never:
counts work that a roll-back undid among what was trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollart_core.scheduling.events import Snapshot
from rollart_core.types import Trajectory

GAUGES = frozenset(
    name
    for name in Snapshot.__dataclass_fields__
    if name.startswith("num_") or name.endswith("_version")
)
"""Fields of a snapshot of which the last life's say where things stand; all others are summed."""


@dataclass(slots=True)
class Lengths:
    """Trajectories, their tokens and their turns."""

    num: int = 0
    tokens: int = 0
    turns: int = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count one more."""
        self.num += 1
        self.tokens += trajectory.num_tokens
        self.turns += len(trajectory.turns)

    def __add__(self, other: Lengths) -> Lengths:
        """Return both together."""
        return Lengths(self.num + other.num, self.tokens + other.tokens, self.turns + other.turns)

    def means(self, name: str) -> dict[str, float]:
        """Return mean tokens and turns; 0 without any."""
        n = max(self.num, 1)
        return {f"{name}_tokens_mean": self.tokens / n, f"{name}_turns_mean": self.turns / n}


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What one batch adds."""

    train_steps: int
    """Updates that were taken."""
    skipped_updates: int
    staleness: Counter[int]
    lengths: Lengths
    by_env: Counter[str] = field(default_factory=Counter)
    """Trajectories."""

    @classmethod
    def of(
        cls, members: Sequence[Trajectory], staleness: Counter[int], updates: Sequence[bool]
    ) -> BatchTotals:
        """Sum up a batch; ``updates`` says of each of its reports whether its update was taken."""
        lengths = Lengths()
        for trajectory in members:
            lengths.add(trajectory)
        by_env = Counter(trajectory.ticket.task.env_id for trajectory in members)
        taken = sum(updates)
        return cls(taken, len(updates) - taken, staleness, lengths, by_env)


def is_update(metrics: Mapping[str, float]) -> bool:
    """Return whether the update of a report was taken: one without signal, or skipped, was not."""
    return metrics.get("updated", 1.0) > 0


@dataclass(slots=True)
class EnvTotals:
    """What the attempts of one environment came to."""

    finished: int = 0
    successes: int = 0
    score: float = 0.0
    reward: float = 0.0
    """Sums over those that finished."""
    failures: Counter[str] = field(default_factory=Counter)
    """Kind -> attempts."""

    def finish(self, trajectory: Trajectory) -> None:
        """Count a trajectory that has a reward."""
        self.finished += 1
        self.successes += bool(trajectory.success)
        self.score += trajectory.score or 0.0
        self.reward += trajectory.reward or 0.0

    def as_dict(self, trained: int) -> dict[str, Any]:
        """Return it as plain JSON, means of what finished."""
        n = max(self.finished, 1)
        rollout = {"success": self.successes, "score": self.score, "reward": self.reward}
        return {
            "finished": self.finished,
            "trained": trained,
            "failures": dict(self.failures),
            "rollout": {k: v / n for k, v in rollout.items()} if self.finished else None,
        }


@dataclass(slots=True)
class Totals:
    """Sums over the RL phase, in this process."""

    began: float = 0.0
    wall_s: float = 0.0
    tokens: int = 0
    generated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finished: Lengths = field(default_factory=Lengths)
    envs: dict[str, EnvTotals] = field(default_factory=dict)
    by_batch: dict[int, BatchTotals] = field(default_factory=dict)
    """Of the batches that stand, by the version they were trained at."""
    undone: Counter[str] = field(default_factory=Counter)
    scheduler: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began; 0 before."""
        return time.perf_counter() - self.began if self.began else 0.0

    @property
    def num_batches(self) -> int:
        """How many batches stand."""
        return len(self.by_batch)

    def finish(self, trajectory: Trajectory) -> None:
        """Count a trajectory that has a reward."""
        self.tokens += trajectory.num_tokens
        self.generated += trajectory.num_loss_tokens
        self.finished.add(trajectory)
        self._of(trajectory).finish(trajectory)

    def fail(self, trajectory: Trajectory) -> None:
        """Count an attempt that failed."""
        assert trajectory.failure is not None
        kind = trajectory.failure.kind.value
        self.failures[kind] += 1
        self._of(trajectory).failures[kind] += 1

    def roll_back(self, policy_version: int) -> None:
        """Take back what was trained from ``policy_version`` on."""
        for version in [v for v in self.by_batch if v >= policy_version]:
            batch = self.by_batch.pop(version)
            self.undone["batches"] += 1
            self.undone["train_steps"] += batch.train_steps
            self.undone["trajectories"] += batch.lengths.num

    def end_incarnation(self, snapshot: Snapshot) -> None:
        """Add the counters of a scheduler that has ended."""
        self.wall_s = time.perf_counter() - self.began
        now = asdict(snapshot)
        if self.scheduler:
            now.update({k: _sum(self.scheduler[k], v) for k, v in now.items() if k not in GAUGES})
        self.scheduler = now

    def by_env(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what became of the attempts of each environment."""
        trained = sum((b.by_env for b in self.by_batch.values()), Counter[str]())
        return {name: self.envs.get(name, EnvTotals()).as_dict(trained[name]) for name in names}

    def _of(self, trajectory: Trajectory) -> EnvTotals:
        return self.envs.setdefault(trajectory.ticket.task.env_id, EnvTotals())

    def as_dict(self) -> dict[str, Any]:
        """Return what the report says of the RL phase."""
        wall_s = max(self.wall_s, 1e-9)
        batches = self.by_batch.values()
        trained = sum((b.lengths for b in batches), Lengths())
        staleness = sum((b.staleness for b in batches), Counter[int]())
        return {
            "train_steps": sum(b.train_steps for b in batches),
            "skipped_updates": sum(b.skipped_updates for b in batches),
            "batches": len(batches),
            "train_wall_s": self.wall_s,
            "tokens_per_s": self.tokens / wall_s,
            "generated_tokens_per_s": self.generated / wall_s,
            "trained_tokens_per_s": trained.tokens / wall_s,
            "staleness": {str(k): staleness[k] for k in sorted(staleness)},
            "failures": dict(self.failures),
            "rolled_back": dict(self.undone),
            "scheduler": self.scheduler,
            "length_bias": self.finished.means("finished") | trained.means("trained"),
        }


def _sum(before: Any, now: Any) -> Any:
    if isinstance(now, Mapping):
        return dict(Counter(before) + Counter(now))
    return before + now
