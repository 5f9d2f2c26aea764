"""The metrics of a batch, for journal and trackers, and the totals of the RL phase, for the report.

    trajectories of a batch  --> flat metrics by name
    weight swaps             --> :class:`SwapLedger`: the cost of each engine's swaps
    trajectories, batches    --> :class:`Totals`: generated, trained, rolled back

Takes: records. Gives: numbers by name. Never: mixes the stalls of two engines, or counts rolled
back work as trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, cast

from pydantic import TypeAdapter

from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.weights import Publication
from rollart_core.scheduling.events import Snapshot
from rollart_core.store.journal_reader import JournalReader
from rollart_core.store.journal_schema import BATCH_TOTALS, ROLLED_BACK, TRAINING
from rollart_core.types import FailureKind, Group, Sample, Trajectory

NGRAM, WINDOW_TOKENS, MOST_SAMPLES = 4, 1024, 64
"""Repeated text: length of an n-gram, window in tokens, maximum number of samples examined."""

GAUGES = frozenset(
    name
    for name in Snapshot.__dataclass_fields__
    if name.startswith("num_") or name.endswith("_version")
)
"""Snapshot fields that keep the value of the last incarnation; all other fields are summed."""


def rollout_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """Return the metrics of the trajectories of a batch.

    Args:
        groups: The batch.
        policy_version: Version of the trainer when it took the batch.
    """
    members = [t for g in groups for t in g.trajectories]
    stale = [policy_version - t.oldest_version for t in members]
    repeated = repeated_share([s for t in members for s in t.samples])
    return {
        **({} if repeated is None else {"rollout/repeated_share": repeated}),
        "rollout/reward_mean": _mean(t.reward or 0.0 for t in members),
        "rollout/score_mean": _mean(t.score or 0.0 for t in members),
        "rollout/success_mean": _mean(float(bool(t.success)) for t in members),
        "rollout/truncated_share": _mean(float(t.status == "truncated") for t in members),
        "rollout/turns_mean": _mean(float(len(t.turns)) for t in members),
        "rollout/loss_tokens_mean": _mean(float(t.num_loss_tokens) for t in members),
        "rollout/rows_per_trajectory": _mean(float(len(t.samples)) for t in members),
        "rollout/tokens_mean": _mean(float(t.num_tokens) for t in members),
        "rollout/members_lost": float(sum(g.num_dispatched - len(g.trajectories) for g in groups)),
        "staleness/mean": _mean(map(float, stale)),
        "staleness/max": float(max(stale, default=0)),
    }


def env_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics and the number of trajectories of each environment."""
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in members:
        by_env.setdefault(trajectory.ticket.task.env_id, []).append(trajectory)
    metrics: dict[str, float] = {}
    for name, some in by_env.items():
        metrics |= {
            f"env/{name}/reward_mean": _mean(t.reward or 0.0 for t in some),
            f"env/{name}/score_mean": _mean(t.score or 0.0 for t in some),
            f"env/{name}/success_mean": _mean(float(bool(t.success)) for t in some),
            f"env/{name}/trajectories": float(len(some)),
        }
    return metrics


def repeated_share(samples: Sequence[Sample], least: int = 1) -> float | None:
    """Return the share of the sampled text that repeats earlier text.

    This is the share of 4-grams of sampled tokens that occurred earlier within the same 1,024
    sampled tokens of the same sample.

    Args:
        samples: The samples of a batch; at most 64 are examined, evenly spaced.
        least: The minimum number of 4-grams.

    Returns:
        0 to 1; None if there are fewer 4-grams.
    """
    import numpy as np

    number = min(len(samples), MOST_SAMPLES)
    total = repeated = 0
    for sample in (samples[i * len(samples) // number] for i in range(number)):
        tokens = np.asarray(sample.token_ids)[np.asarray(sample.loss_mask)].astype(np.uint64)
        for start in range(0, len(tokens), WINDOW_TOKENS):
            window = tokens[start : start + WINDOW_TOKENS]
            count = len(window) - NGRAM + 1
            if count < 1:
                continue
            grams = np.zeros(count, np.uint64)
            for i in range(NGRAM):  # hash each 4-gram as a polynomial modulo 2^64
                grams = grams * np.uint64(6364136223846793005) + window[i : i + count]
            total += count
            repeated += count - len(np.unique(grams))
    return repeated / total if total >= max(least, 1) else None


def staleness_histogram(groups: Sequence[Group], policy_version: int) -> Counter[int]:
    """Return the number of samples of a batch by staleness, in versions."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            histogram[policy_version - trajectory.oldest_version] += len(trajectory.samples)
    return histogram


def components_mean(trajectories: Iterable[Trajectory]) -> Mapping[str, float]:
    """Return the mean of each reward component over the trajectories that contain it."""
    sums: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_components.items():
            sums.setdefault(name, []).append(value)
    return {f"reward/{name}": _mean(values) for name, values in sums.items()}


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0


@dataclass(slots=True)
class EngineSwaps:
    """The sums of one engine's weight swaps."""

    num_swaps: int = 0
    stall_s: float = 0.0
    """Total time without generation because of swaps, in seconds."""
    stall_s_max: float = 0.0
    fetch_s: float = 0.0
    num_bytes: int = 0
    moved_bytes: int = 0
    num_recomputed_tokens: int = 0
    num_restarted: int = 0
    """Number of restarted generations (``rollout.in_flight: restart``)."""

    def add(self, swap: WeightSwap) -> None:
        """Add one swap."""
        self.num_swaps += 1
        self.stall_s += swap.stall_s
        self.stall_s_max = max(self.stall_s_max, swap.stall_s)
        self.fetch_s += swap.fetch_s
        self.num_bytes += swap.num_bytes
        self.moved_bytes += swap.moved_bytes
        self.num_recomputed_tokens += swap.num_recomputed_tokens
        self.num_restarted += swap.num_restarted


class SwapLedger:
    """The weight swaps of a run."""

    def __init__(self) -> None:
        self._new: list[WeightSwap] = []
        self._engines: dict[str, EngineSwaps] = {}

    def add(self, swaps: Sequence[WeightSwap]) -> None:
        """Add one swap of each engine."""
        self._new.extend(swaps)
        for swap in swaps:
            self._engines.setdefault(swap.engine or "engine", EngineSwaps()).add(swap)

    def batch_metrics(self, publication: Publication) -> dict[str, float]:
        """Return metrics of a publication, and of the swaps since the last call."""
        swaps, self._new = self._new, []
        moved = publication.moved_bytes
        metrics = {
            "time/publish_s": publication.publish_s,
            "time/swap_stall_s": sum(s.stall_s for s in swaps),
            "weights/bytes": float(publication.num_bytes),
            "weights/moved_bytes": float(publication.num_bytes if moved is None else moved),
            "weights/restarted": float(sum(s.num_restarted for s in swaps)),
        }
        for swap in swaps:
            name = f"weights/{swap.engine or 'engine'}"
            metrics[f"{name}/stall_s"] = metrics.get(f"{name}/stall_s", 0.0) + swap.stall_s
            metrics[f"{name}/fetch_s"] = metrics.get(f"{name}/fetch_s", 0.0) + swap.fetch_s
            metrics[f"{name}/version"] = float(swap.policy_version)
        return metrics

    def begin_again(self) -> None:
        """Discard the swaps since the last batch, which was rolled back."""
        self._new.clear()

    def totals(self) -> dict[str, dict[str, float]]:
        """Return the sums by engine."""
        return {name: asdict(engine) for name, engine in sorted(self._engines.items())}


@dataclass(slots=True)
class Lengths:
    """Numbers of trajectories, tokens and turns."""

    num: int = 0
    tokens: int = 0
    turns: int = 0

    def add(self, trajectory: Trajectory) -> None:
        """Add one trajectory."""
        self.num += 1
        self.tokens += trajectory.num_tokens
        self.turns += len(trajectory.turns)

    def __add__(self, other: Lengths) -> Lengths:
        """Return the sums of both."""
        return Lengths(self.num + other.num, self.tokens + other.tokens, self.turns + other.turns)

    def means(self, name: str) -> dict[str, float]:
        """Return the mean tokens and turns; 0 without trajectories."""
        n = max(self.num, 1)
        return {f"{name}_tokens_mean": self.tokens / n, f"{name}_turns_mean": self.turns / n}


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The contribution of one batch to the totals."""

    train_steps: int
    """Number of applied updates."""
    skipped_updates: int
    staleness: Counter[int]
    lengths: Lengths
    by_env: Counter[str] = field(default_factory=Counter)
    """Number of trajectories by environment."""
    has_signal: bool = True
    """Whether a group of it had an advantage."""
    step_s: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds; see :func:`step_seconds`."""

    @classmethod
    def of(
        cls,
        members: Sequence[Trajectory],
        staleness: Counter[int],
        reports: Sequence[Mapping[str, float]],
        step_s: dict[str, float],
    ) -> BatchTotals:
        """Summarise a batch from its trajectories, the metrics of its updates, and its times."""
        lengths = Lengths()
        for trajectory in members:
            lengths.add(trajectory)
        by_env = Counter(trajectory.ticket.task.env_id for trajectory in members)
        taken = sum(map(is_update, reports))
        has_signal = any(metrics.get("effective_groups", 1.0) for metrics in reports)
        return cls(taken, len(reports) - taken, staleness, lengths, by_env, has_signal, step_s)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return cast("dict[str, Any]", _BATCH.dump_python(self, mode="json"))


_BATCH = TypeAdapter(BatchTotals)


def step_seconds(
    reports: Sequence[Mapping[str, float]], *, waited_s: float, train_s: float, publish_s: float
) -> dict[str, float]:
    """Return the seconds that the trainer spent on a batch, by phase.

    Args:
        reports: The metrics of its updates.
        waited_s: Seconds that the trainer waited for the batch.
        train_s: Seconds from the batch to the end of the publication of the weights.
        publish_s: Seconds of the publication.
    """
    updates = {
        name: sum(metrics.get(f"{name}_s", 0.0) for metrics in reports)
        for name in ("batch", "forward", "backward", "optimizer")
    }
    phases = {"wait": waited_s, **updates, "publish": publish_s}
    return {**phases, "other": waited_s + train_s - sum(phases.values())}


def is_update(metrics: Mapping[str, float]) -> bool:
    """Return whether the update of a report was applied, not skipped or without signal."""
    return metrics.get("updated", 1.0) > 0


@dataclass(slots=True)
class EnvTotals:
    """The sums over the attempts of one environment."""

    finished: int = 0
    successes: int = 0
    score: float = 0.0
    reward: float = 0.0
    """Score and reward are sums over the finished attempts."""
    failures: Counter[str] = field(default_factory=Counter)
    """Kind -> attempts."""

    def finish(self, trajectory: Trajectory) -> None:
        """Count a trajectory that has a reward."""
        self.finished += 1
        self.successes += bool(trajectory.success)
        self.score += trajectory.score or 0.0
        self.reward += trajectory.reward or 0.0

    def as_dict(self, trained: int) -> dict[str, Any]:
        """Return the totals as plain JSON, with means over the finished attempts."""
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
    """Sums over the RL phase, in all processes of the run."""

    began: float = 0.0
    """When this process began it."""
    earlier_s: float = 0.0
    """Seconds of the RL phase in earlier processes."""
    wall_s: float = 0.0
    tokens: int = 0
    generated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finished: Lengths = field(default_factory=Lengths)
    envs: dict[str, EnvTotals] = field(default_factory=dict)
    by_batch: dict[int, BatchTotals] = field(default_factory=dict)
    """The batches that are not rolled back, by the version at which they were trained."""
    undone: Counter[str] = field(default_factory=Counter)
    scheduler: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process began the phase; 0 if it has not begun it."""
        return time.perf_counter() - self.began if self.began else 0.0

    @property
    def num_batches(self) -> int:
        """The number of batches that are not rolled back."""
        return len(self.by_batch)

    def restore(self, journal: JournalReader) -> None:
        """Add what earlier processes of the run have recorded."""
        self.earlier_s = journal.spent_s(TRAINING)
        for name, failure, num, *sums in journal.attempt_sums():
            env = self.envs.setdefault(name, EnvTotals())
            if failure is None:
                successes, env.score, env.reward, tokens, generated, turns = sums
                env.finished, env.successes = num, int(successes)
                self.tokens += int(tokens)
                self.generated += int(generated)
                self.finished += Lengths(num, int(tokens), int(turns))
            elif failure != FailureKind.CANCELLED:
                self.failures[failure] += num
                env.failures[failure] += num
        events = [*journal.events(kind=BATCH_TOTALS), *journal.events(kind=ROLLED_BACK)]
        for event in sorted(events, key=lambda event: event.seq):
            version = event.policy_version or 0
            if event.kind == ROLLED_BACK:
                self.roll_back(version)
            else:
                with journal.decoding():
                    self.by_batch[version] = _BATCH.validate_json(event.payload)

    @property
    def has_signal(self) -> bool:
        """Whether any group had an advantage; True before the first batch."""
        return not self.by_batch or any(batch.has_signal for batch in self.by_batch.values())

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
        """Remove the batches trained from ``policy_version`` on."""
        for version in [v for v in self.by_batch if v >= policy_version]:
            batch = self.by_batch.pop(version)
            self.undone["batches"] += 1
            self.undone["train_steps"] += batch.train_steps
            self.undone["trajectories"] += batch.lengths.num

    def end_incarnation(self, snapshot: Snapshot) -> None:
        """Add the counters of a scheduler that has ended."""
        self.wall_s = self.earlier_s + self.elapsed_s
        now = asdict(snapshot)
        if self.scheduler:
            now.update({k: _sum(self.scheduler[k], v) for k, v in now.items() if k not in GAUGES})
        self.scheduler = now

    def by_env(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the outcomes of the attempts of each environment."""
        trained = sum((b.by_env for b in self.by_batch.values()), Counter[str]())
        return {name: self.envs.get(name, EnvTotals()).as_dict(trained[name]) for name in names}

    def _of(self, trajectory: Trajectory) -> EnvTotals:
        return self.envs.setdefault(trajectory.ticket.task.env_id, EnvTotals())

    def as_dict(self) -> dict[str, Any]:
        """Return the report's entries about the RL phase."""
        wall_s = max(self.wall_s, 1e-9)
        batches = self.by_batch.values()
        trained = sum((b.lengths for b in batches), Lengths())
        staleness = sum((b.staleness for b in batches), Counter[int]())
        timed = [b.step_s for b in batches if b.step_s]
        return {
            "step_s": {k: fmean(s[k] for s in timed) for k in (timed[0] if timed else ())},
            "train_steps": sum(b.train_steps for b in batches),
            "skipped_updates": sum(b.skipped_updates for b in batches),
            "batches": len(batches),
            "has_signal": self.has_signal,
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
