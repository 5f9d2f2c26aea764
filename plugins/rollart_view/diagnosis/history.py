"""The metrics of a run as arrays, from its journal, by policy_version.

Takes: a run directory; the run may be in progress, ended or killed. Gives: a :class:`History`.
Never: interprets it; :mod:`rollart_view.diagnosis.diagnose` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollart_core.store.journal_reader import JournalReader
from rollart_core.store.journal_schema import ROLLED_BACK, OutcomeRow
from rollart_view.diagnosis.series import FloatArray

IntArray = npt.NDArray[np.int64]

BUSY = "derived/rollouts_busy_share"
"""Share of the time since the last batch in which at least one episode ran."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric; batches without it, or with a value that is not a number, are left out."""

    versions: IntArray
    """policy_version of each value, ascending ``[N]``."""
    values: FloatArray
    """``[N]``."""

    def __len__(self) -> int:
        return len(self.versions)

    def between(self, first: int, stop: int | None = None) -> Series:
        """Return the part with ``first <= policy_version < stop``; None: to the end."""
        end = np.iinfo(np.int64).max if stop is None else stop
        a, b = np.searchsorted(self.versions, (first, end))
        return Series(self.versions[a:b], self.values[a:b])


EMPTY = Series(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of learning: success, or the reward if there is no success."""

    name: Literal["success", "reward"]
    series: Series
    low: float
    """The lowest possible value."""
    high: float
    """The highest possible value; for a reward, the highest of any episode."""
    num_samples: int | None
    """Episodes per batch; None for a reward."""

    def is_solved(self, level: float, share: float) -> bool:
        """Return whether a level is at ``share`` of the possible range."""
        return self.high > self.low and level - self.low >= share * (self.high - self.low)

    def show(self, value: float) -> str:
        """Return a value as text."""
        return f"{value:.1%}" if self.name == "success" else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class History:
    """The input of a diagnosis."""

    versions: IntArray
    """policy_version of each batch that counts, ascending ``[B]``; none that was rolled back."""
    series: Mapping[str, Series]
    config: Mapping[str, object] = field(default_factory=dict)
    rewards: tuple[float, float] | None = None
    """Lowest and highest reward of any episode; None if no episode has one."""
    success: float | None = None
    """Success of the last third of all episodes, dropped groups included; None without episodes."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups that were not trained."""
    num_groups: int = 0
    """Groups that were trained."""
    ended: str | None = None
    """Why the run ended; None if it is in progress, or was killed."""
    went_back: tuple[str, ...] = ()
    """Each rollback to a checkpoint: the version and the reason."""

    def get(self, *names: str) -> Series:
        """Return the first metric of these that the run has."""
        found = (self.series[name] for name in names if name in self.series)
        return next(found, EMPTY)

    def measure(self) -> Measure:
        """Return success per batch, or reward if no episode ever succeeded."""
        success = self.get("rollout/success_mean")
        reward = self.get("rollout/reward_mean")
        low, high = self.rewards or (0.0, float(np.max(reward.values, initial=0.0)))
        if np.any(success.values > 0) or not np.any(reward.values):
            return Measure("success", success, 0.0, 1.0, self._episodes_per_batch())
        return Measure("reward", reward, low, high, None)

    def _episodes_per_batch(self) -> int:
        sizes = (self.setting(f"rollout.{name}") for name in ("groups_per_batch", "group_size"))
        return math.prod(size for size in sizes if isinstance(size, int))

    def before(self, version: int) -> History:
        """Return the run as if it had ended before a policy_version."""
        series = {name: s.between(0, version) for name, s in self.series.items()}
        versions = self.versions[self.versions < version]
        return replace(self, versions=versions, series=series, dropped={}, success=None)

    def setting(self, key: str) -> object:
        """Return a config value by its dotted key; None if there is none."""
        found: object = self.config
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def read_history(run_dir: Path) -> History:
    """Return the history of a run.

    Raises:
        JournalError: If ``run_dir`` holds no journal, or one that cannot be read.
    """
    with JournalReader(run_dir) as reader:
        return _history(run_dir, reader)


def _history(run_dir: Path, reader: JournalReader) -> History:
    with reader.snapshot():
        config = reader.config()
        series = _by_version(reader.metric_values())
        batches = [b for b in reader.batches() if b.state == "trained"]
        attempts = reader.outcomes()
        dropped = reader.dropped_groups()
        stops = reader.events(kind="StopRun")
        back = reader.events(kind=ROLLED_BACK)
    taken = {b.batch: b.time_s for b in batches}
    with reader.decoding():
        reasons = {e.seq: str(json.loads(e.payload)["reason"]) for e in (*stops, *back)}
    ended = stops[-1] if stops and (not back or back[-1].seq < stops[-1].seq) else None
    finished = [r for r in attempts if r.failure_kind is None]
    rewards = [r.reward for r in finished if r.reward is not None]
    known = [r.success for r in finished if r.success is not None]
    recent = known[-max(1, len(known) // 3) :]
    busy = _busy(attempts, taken)
    return History(
        versions=np.array(sorted(taken or _batch_versions(series)), np.int64),
        series={**series, BUSY: busy} if len(busy) else series,
        config=config,
        rewards=(min(rewards), max(rewards)) if rewards else None,
        success=sum(recent) / len(recent) if recent else None,
        dropped=dropped,
        num_groups=sum(len(b.group_ids) for b in batches),
        ended=reasons[ended.seq] if ended else None,
        went_back=tuple(f"to policy_version {e.policy_version}: {reasons[e.seq]}" for e in back),
    )


def _by_version(rows: Iterable[tuple[str, int, float]]) -> dict[str, Series]:
    """Return each metric by policy_version; several train_steps of one batch become one value.

    The value is their mean; for norms, ratios and maxima it is the largest value.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for name, version, value in rows:
        if math.isfinite(value):
            found.setdefault(name, {}).setdefault(version, []).append(value)
    series = {}
    for name, by_version in found.items():
        versions = sorted(by_version)
        of = max if name.endswith(("_max", "/grad_norm", "/approx_kl")) else _mean
        values = np.array([of(by_version[v]) for v in versions], np.float64)
        series[name] = Series(np.array(versions, np.int64), values)
    return series


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _batch_versions(series: Mapping[str, Series]) -> list[int]:
    return [int(version) for version in series.get("rollout/reward_mean", EMPTY).versions]


def _busy(attempts: Iterable[OutcomeRow], taken: Mapping[int, float]) -> Series:
    """Return the share of the time between two batches with a running episode (:data:`BUSY`).

    Args:
        attempts: Each ran for ``wall_s`` until ``time_s``.
        taken: policy_version -> when the trainer took the batch.
    """
    ran = sorted((r.time_s - r.wall_s, r.time_s) for r in attempts)
    if not ran or len(taken) < 2:
        return EMPTY
    begins, ends = np.array(ran).T
    covered = np.maximum.accumulate(ends)
    # Busy time up to the end of each episode: the union of overlapping episodes.
    fresh = np.maximum(0.0, covered - np.maximum(begins, np.concatenate([[-np.inf], covered[:-1]])))
    total = np.cumsum(fresh)
    versions = sorted(taken)
    times = np.array([taken[v] for v in versions])
    at = np.searchsorted(covered, times)
    last = np.minimum(at, len(covered) - 1)
    behind = np.clip(covered[last] - times, 0.0, fresh[last])
    spent, passed = np.diff(total[last] - behind), np.diff(times)
    sound = passed > 0
    kept = np.array(versions[1:], np.int64)[sound]
    return Series(kept, np.clip(spent[sound] / passed[sound], 0.0, 1.0))
