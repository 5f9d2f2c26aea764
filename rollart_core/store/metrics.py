"""What a batch says of rollout and training, as flat numbers for journal and trackers.

Takes: records. Gives: metrics by name. Never: keeps state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollart_core.types import Group, Sample, Trajectory

NGRAM, WINDOW_TOKENS, MOST_SAMPLES = 4, 1024, 64
"""Repeated text: length of what repeats, tokens within which it counts, samples looked at."""


def rollout_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """Return what the trajectories of a batch were like.

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
        "rollout/tokens_mean": _mean(float(t.num_tokens) for t in members),
        "rollout/members_lost": float(sum(g.num_dispatched - len(g.trajectories) for g in groups)),
        "staleness/mean": _mean(map(float, stale)),
        "staleness/max": float(max(stale, default=0)),
    }


def env_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return what those of each environment were like, and how many they were."""
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
    """Return the share of the sampled text that repeats what stands shortly before it.

    That is the share of 4-grams of sampled tokens that occurred earlier within the same 1,024
    sampled tokens of the same sample.

    Args:
        samples: Of a batch; at most 64 are looked at, evenly spaced.
        least: Fewest 4-grams that a share is taken of.

    Returns:
        0 to 1; None when there are fewer 4-grams.
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
            for i in range(NGRAM):  # a polynomial modulo 2^64 stands for the 4-gram
                grams = grams * np.uint64(6364136223846793005) + window[i : i + count]
            total += count
            repeated += count - len(np.unique(grams))
    return repeated / total if total >= max(least, 1) else None


def staleness_histogram(groups: Sequence[Group], policy_version: int) -> Counter[int]:
    """Return how many samples of a batch have which staleness, in versions."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            histogram[policy_version - trajectory.oldest_version] += len(trajectory.samples)
    return histogram


def components_mean(trajectories: Iterable[Trajectory]) -> Mapping[str, float]:
    """Return the mean of each reward component over the trajectories that have it."""
    sums: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_components.items():
            sums.setdefault(name, []).append(value)
    return {f"reward/{name}": _mean(values) for name, values in sums.items()}


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0
