"""Conversion of groups to minibatches and microbatches, in numpy.

Takes: groups, and the advantage and signal rows of their samples. Gives: groups with shaped rewards
(penalties, one scale for all environments); their samples in canonical order, divided into
minibatches, and packed to a token budget; and metrics of the whole batch. Never: imports torch,
changes a record (journal and reports contain the original rewards), or lets a number depend on the
order in which groups arrived.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollart_core.contracts.algorithm import ZeroAdvantage
from rollart_core.errors import BatchRefused
from rollart_core.types import FloatArray, Group, IntArray, Sample, Trajectory

if TYPE_CHECKING:  # the tests on GPUs run without pydantic
    from rollart_core.config.training import Overlong, Shaping

Statistics = npt.NDArray[np.float64]
"""``[E, 3]``: count, mean and sum of squared deviations of each environment's rewards."""


@dataclass(slots=True)
class RewardShaper:
    """Shapes the rewards of a run.

    Statistics are Welford's, merged batch by batch (Chan, Golub and LeVeque 1979).
    """

    shapings: Mapping[str, Shaping]
    """The shaping by name of the environment; the rewards of others do not change."""
    statistics: Statistics
    """The statistics of the environments, in the order of their names."""

    @classmethod
    def of(cls, shapings: Mapping[str, Shaping]) -> RewardShaper:
        """Return a shaper with empty statistics."""
        return cls(dict(sorted(shapings.items())), np.zeros((len(shapings), 3)))

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with shaped rewards; the statistics include these groups."""
        penalised = [self._penalised(g) for g in groups]
        for k, (name, shaping) in enumerate(self.shapings.items()):
            if shaping.normalise == "running":
                rewards = [
                    t.reward or 0.0
                    for g in penalised
                    if g.task.env_id == name
                    for t in g.trajectories
                ]
                self.statistics[k] = _merged(self.statistics[k], np.array(rewards))
        return [self._scaled(g) for g in penalised]

    def _penalised(self, group: Group) -> Group:
        shaping = self.shapings.get(group.task.env_id)
        if shaping is None or shaping.overlong is None:
            return group
        less = [overlong_penalty(t.num_loss_tokens, shaping.overlong) for t in group.trajectories]
        return _with(
            group,
            [
                _rewarded(t, (t.reward or 0.0) - p, 1.0)
                for t, p in zip(group.trajectories, less, strict=True)
            ],
        )

    def _scaled(self, group: Group) -> Group:
        shaping = self.shapings.get(group.task.env_id)
        if shaping is None:
            return group
        mean, std = 0.0, 1.0
        if shaping.normalise == "running":
            number, mean, squares = self.statistics[list(self.shapings).index(group.task.env_id)]
            std = math.sqrt(squares / number) or 1.0
        members = []
        for trajectory in group.trajectories:
            value = ((trajectory.reward or 0.0) - mean) / std * shaping.scale
            if shaping.clip is not None:
                value = min(max(value, shaping.clip[0]), shaping.clip[1])
            members.append(_rewarded(trajectory, value, shaping.scale / std))
        return _with(group, members)


def overlong_penalty(num_tokens: int, overlong: Overlong) -> float:
    """Return the penalty of an episode with ``num_tokens`` sampled tokens.

    It is 0 up to ``max_tokens - buffer_tokens``, ``penalty`` from ``max_tokens`` on, and linear in
    between: the soft overlong punishment of DAPO (arXiv:2503.14476, section 3.4), times
    ``penalty``.
    """
    over = num_tokens - (overlong.max_tokens - overlong.buffer_tokens)
    return overlong.penalty * min(max(over / overlong.buffer_tokens, 0.0), 1.0)


def _rewarded(trajectory: Trajectory, reward: float, factor: float) -> Trajectory:
    """Return a trajectory with another reward; turn rewards are scaled, the last gets the rest."""
    turns = trajectory.turns
    given = sum(turn.reward for turn in turns)
    if turns and math.isclose(given, trajectory.reward or 0.0, rel_tol=1e-6, abs_tol=1e-9):
        scaled = [turn.reward * factor for turn in turns]
        scaled[-1] += reward - sum(scaled)
        turns = tuple(replace(t, reward=r) for t, r in zip(turns, scaled, strict=True))
    return replace(trajectory, reward=reward, turns=turns)


def _with(group: Group, members: Sequence[Trajectory]) -> Group:
    return replace(group, trajectories=tuple(members))


def _merged(known: Statistics, rewards: npt.NDArray[np.float64]) -> Statistics:
    """Return the statistics merged with those of new rewards."""
    if not len(rewards):
        return known
    number, mean, squares = known
    total = number + len(rewards)
    step = rewards.mean() - mean
    return np.array(
        [
            total,
            mean + step * len(rewards) / total,
            squares
            + ((rewards - rewards.mean()) ** 2).sum()
            + step * step * number * len(rewards) / total,
        ]
    )


@dataclass(slots=True)
class BatchRow:
    """One sample in the trainer."""

    sample: Sample
    advantages: FloatArray
    """``[T]``."""
    group: int
    """Position of its group in canonical order."""
    staleness: int
    """Staleness of its trajectory, in versions."""
    trajectory: int = 0
    """Position of its trajectory in canonical order, over all groups."""
    signals: dict[str, FloatArray] = field(default_factory=dict)
    """Signal name -> ``[T]``."""

    @property
    def is_live(self) -> bool:
        """Whether any advantage differs from 0."""
        return bool(np.any(self.advantages))


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimizer update."""

    rows: tuple[BatchRow, ...]
    """The samples that go through the model."""
    total_loss_tokens: int
    total_samples: int
    total_trajectories: int = 0
    loss_scale: float = 1.0
    """Factor of the loss; below 1 if too few groups of the batch have an advantage."""


def canonical(groups: Sequence[Group]) -> list[Group]:
    """Return the groups sorted by id, and their members by index."""
    ordered = sorted(groups, key=lambda g: g.group_id)
    return [
        replace(g, trajectories=tuple(sorted(g.trajectories, key=lambda t: t.ticket.index)))
        for g in ordered
    ]


def make_rows(
    groups: Sequence[Group], advantages: Sequence[FloatArray], policy_version: int
) -> list[BatchRow]:
    """Return one row per sample with loss tokens, in the order of groups, members, samples.

    Args:
        groups: Groups in canonical order.
        advantages: One ``[T]`` row per sample, as returned by the algorithm.
        policy_version: The current version of the trainer.

    Raises:
        BatchRefused: If the advantages do not match the samples or are not finite, if the first
            token of a sample is a loss token (it has no preceding token to predict it from), or if
            the engine's logprobs of sampled tokens are not finite.
    """
    num_samples = sum(len(g.samples) for g in groups)
    if len(advantages) != num_samples:
        raise BatchRefused(f"the algorithm has {len(advantages)} rows for {num_samples} samples")
    rows: list[BatchRow] = []
    given = iter(advantages)
    members = [(position, t) for position, g in enumerate(groups) for t in g.trajectories]
    for number, (position, trajectory) in enumerate(members):
        staleness = policy_version - trajectory.oldest_version
        for sample in trajectory.samples:
            row = BatchRow(sample, next(given), position, staleness, number)
            _check(row, groups[position].group_id)
            if sample.num_loss_tokens:
                rows.append(row)
    return rows


def attach(
    name: str, rows: Sequence[BatchRow], samples: Sequence[Sample], given: Sequence[FloatArray]
) -> None:
    """Add the ``[T]`` values of its sample to each row, as a signal.

    Args:
        name: The name of the signal.
        rows: The rows of the samples with loss tokens, in their order.
        samples: All samples.
        given: One ``[T]`` row per sample.

    Raises:
        BatchRefused: If the values do not match the samples, or are not finite at loss tokens.
    """
    shapes = [np.shape(row) for row in given]
    if shapes != [s.token_ids.shape for s in samples]:
        raise BatchRefused(f"{name} do not match the samples: each sample needs one [T] row")
    live = [np.asarray(row) for row, s in zip(given, samples, strict=True) if s.num_loss_tokens]
    for row, values in zip(rows, live, strict=True):
        check_finite(name, values, row.sample, f"number {row.group} of the batch")
        row.signals[name] = values


def num_effective_groups(rows: Sequence[BatchRow]) -> int:
    """Return the number of groups with any advantage other than 0."""
    return len({row.group for row in rows if row.is_live})


def split(
    rows: Sequence[BatchRow],
    num_minibatches: int,
    policy: ZeroAdvantage,
    *,
    min_effective_groups: int | None = None,
) -> list[Minibatch]:
    """Divide rows into minibatches of whole groups, in order and as evenly as possible.

    Args:
        rows: Rows in canonical order.
        num_minibatches: Maximum number of minibatches; there are fewer if there are fewer groups.
        policy: How samples whose advantages are all 0 are handled.
        min_effective_groups: If fewer groups have an advantage, the loss of all minibatches is
            scaled by their number divided by this. If None, it is never scaled.
    """
    scale = 1.0
    if min_effective_groups:
        scale = min(1.0, num_effective_groups(rows) / min_effective_groups)
    kept = [r for r in rows if policy != "drop" or r.is_live]
    groups = sorted({r.group for r in kept})
    parts = np.array_split(np.array(groups, dtype=np.int64), min(num_minibatches, len(groups)) or 1)
    return [_minibatch([r for r in kept if r.group in set(part)], policy, scale) for part in parts]


def pack(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins of indices by next-fit decreasing; ties keep their order.

    Args:
        costs: Tokens of each item; an item above the budget gets its own bin.
        budget: Maximum number of tokens per bin.
    """
    bins: list[list[int]] = []
    capacity = -1
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if costs[i] > capacity:
            bins.append([])
            capacity = budget
        bins[-1].append(i)
        capacity -= costs[i]
    return bins


def balance(costs: Sequence[int], budget: int, num_ranks: int) -> list[list[int]]:
    """Return bins of near-equal cost, largest first, with the same number for each rank.

    The largest item goes to the emptiest bin (Graham 1969, LPT). The number of rounds of
    ``num_ranks`` bins is the smallest that keeps the budget. With fewer items than ranks, there are
    fewer bins.

    Args:
        costs: Tokens of each item; an item above the budget gets its own bin.
        budget: Maximum number of tokens per bin.
        num_ranks: The number of bins is a multiple of it.
    """
    largest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    num_bins = num_ranks * max(1, -(-sum(costs) // (budget * num_ranks)))
    while True:
        emptiest: list[tuple[int, int, list[int]]] = [(0, b, []) for b in range(num_bins)]
        for i in largest_first:
            cost, b, members = emptiest[0]
            heapq.heapreplace(emptiest, (cost + costs[i], b, [*members, i]))
        if all(cost <= budget or len(members) == 1 for cost, _, members in emptiest):
            break
        num_bins += num_ranks
    return [
        members for cost, b, members in sorted(emptiest, key=lambda e: (-e[0], e[1])) if members
    ]


def level(bins: Sequence[list[int]], num_ranks: int) -> list[list[int]]:
    """Return bins in order; the largest are halved until each rank gets the same number."""
    levelled = list(bins)
    while len(levelled) % num_ranks:
        fullest = max(range(len(levelled)), key=lambda b: len(levelled[b]))
        members = levelled[fullest]
        if len(members) == 1:
            break
        half = len(members) // 2
        levelled[fullest : fullest + 1] = [members[:half], members[half:]]
    return levelled


def imbalance(costs: Sequence[int], num_ranks: int) -> float:
    """Return the relative time of synchronised ranks compared with equal costs in each round.

    Args:
        costs: Costs of the bins, which are assigned to ranks in rounds.
        num_ranks: The number of ranks.

    Returns:
        1 if no rank waits; ``num_ranks`` if one rank does all the work.
    """
    rounds = [max(costs[i : i + num_ranks]) for i in range(0, len(costs), num_ranks)]
    return num_ranks * sum(rounds) / max(1, sum(costs))


def model_input(sample: Sample) -> IntArray:
    """Return the tokens that the model must read: all tokens before the last loss token."""
    return sample.token_ids[: int(np.flatnonzero(sample.loss_mask)[-1])]


def _minibatch(rows: list[BatchRow], policy: ZeroAdvantage, scale: float) -> Minibatch:
    forwarded = [r for r in rows if policy == "train" or r.is_live]
    return Minibatch(
        tuple(forwarded),
        total_loss_tokens=sum(r.sample.num_loss_tokens for r in rows),
        total_samples=len(rows),
        total_trajectories=len({r.trajectory for r in rows}),
        loss_scale=scale,
    )


def _check(row: BatchRow, group_id: str) -> None:
    sample = row.sample
    if row.advantages.shape != sample.token_ids.shape:
        raise BatchRefused(
            f"group {group_id}: advantages of shape {row.advantages.shape} for a sample of "
            f"{sample.num_tokens} tokens"
        )
    if not np.isfinite(row.advantages).all():
        raise BatchRefused(f"group {group_id}: its advantages are not finite")
    if sample.num_tokens and sample.loss_mask[0]:
        raise BatchRefused(f"group {group_id}: the first token of a sample cannot be a loss token")
    check_finite("inference_logprobs", sample.inference_logprobs, sample, group_id)


def check_finite(name: str, values: FloatArray, sample: Sample, group_id: str) -> None:
    """Raise BatchRefused if values of loss tokens are not finite; the error names the first."""
    bad = np.flatnonzero(sample.loss_mask & ~np.isfinite(values))
    if len(bad):
        raise BatchRefused(
            f"group {group_id}: {name} of {len(bad)} sampled tokens are not finite (the first: "
            f"{values[bad[0]]}, of token {sample.token_ids[bad[0]]} at {bad[0]}); no loss can be "
            "computed from them"
        )


def batch_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return the metrics of the whole batch, which all its reports contain."""
    num_groups, num_effective = len({row.group for row in rows}), num_effective_groups(rows)
    staleness = np.array([r.staleness for r in rows] or [0])
    return {
        "zero_advantage_groups": float(num_groups - num_effective),
        "effective_groups": float(num_effective),
        "batch_groups": float(num_groups),
        "sampled_entropy": _sampled_entropy(rows),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }


def _sampled_entropy(rows: Sequence[BatchRow]) -> float:
    """Return the mean of -log p of all sampled tokens, from the engines' logprobs.

    This estimates the entropy of the sampling policy over all tokens of the batch, including those
    of samples without a forward pass.
    """
    num_tokens = sum(r.sample.num_loss_tokens for r in rows)
    total = sum(
        float(r.sample.inference_logprobs[r.sample.loss_mask].sum(dtype=np.float64)) for r in rows
    )
    return -total / max(1, num_tokens)


def value_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return how well the critic predicts the returns, before it learns from the batch.

    ``explained_variance`` is ``1 - Var(returns - values) / Var(returns)``: 1 is a perfect
    prediction, 0 is as good as a constant, and a negative value is worse than a constant.
    """
    if not rows or not {"values", "returns"} <= set(rows[0].signals):
        return {}
    masks = [r.sample.loss_mask for r in rows]
    values, returns = (
        np.concatenate([r.signals[name][m] for r, m in zip(rows, masks, strict=True)])
        for name in ("values", "returns")
    )
    spread_of_returns = float(returns.var())
    if spread_of_returns == 0:
        return {"value_mean": float(values.mean())}
    unexplained = float((returns - values).var()) / spread_of_returns
    return {"value_mean": float(values.mean()), "explained_variance": 1 - unexplained}
