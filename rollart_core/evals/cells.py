"""The cells of an evaluation's table: success, score and pass@k per environment and player.

Takes: episodes. Gives: :class:`Cell` records, and unbiased pass@k with 95% intervals. Never: counts
a failed episode as unsolved, shows 0 if nothing was measured, or counts attempts at one task as
independent tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rollart_core.evals.episodes import Episode
from rollart_core.store.estimates import (
    Clusters,
    Estimate,
    by_task,
    clustered_mean,
    clustered_share,
    named_means,
)

NO_TURN = (
    "every episode was truncated before its first turn, so nothing was measured: the first prompt "
    "is too long (rollout.max_context_tokens, or the server's own limit)"
)
SAYS_NOTHING = "the environment does not report success"


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of one player in one environment."""

    env: str
    column: str
    num_tasks: int = 0
    """Tasks with at least one completed episode."""
    num_attempts: int = 0
    """Planned attempts per task."""
    success: Estimate | None = None
    """Success rate, clustered by the environment's clusters of tasks, or by task. None if nothing
    was measured."""
    score: Estimate | None = None
    rewards: Mapping[str, Estimate] = field(default_factory=dict)
    """The mean ``reward``, and the mean of each of its components."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """k -> pass@k over tasks."""
    num_episodes: int = 0
    """Completed episodes."""
    num_failed: int = 0
    """Episodes that failed despite retries. They are in no estimate."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> number of failed attempts, including those with a successful retry."""
    num_truncated: int = 0
    mean_turns: float | None = None
    mean_loss_tokens: float | None = None
    why: str = ""
    """Why there is no success rate, or no result at all."""

    def as_dict(self) -> dict[str, object]:
        """Return the cell as plain JSON."""
        return {
            "env": self.env,
            "column": self.column,
            "tasks": self.num_tasks,
            "attempts_per_task": self.num_attempts,
            "success": plain_estimate(self.success),
            "score": plain_estimate(self.score),
            "rewards": {name: plain_estimate(mean) for name, mean in self.rewards.items()},
            "pass_at": {str(k): plain_estimate(e) for k, e in self.pass_at.items()},
            "episodes": self.num_episodes,
            "failed": self.num_failed,
            "failures": dict(self.failures),
            "truncated": self.num_truncated,
            "mean_turns": self.mean_turns,
            "mean_loss_tokens": self.mean_loss_tokens,
            "why": self.why,
        }


def cell_of(
    env: str,
    column: str,
    episodes: Sequence[Episode],
    num_attempts: int,
    *,
    says_success: bool,
    clusters: Clusters | None = None,
) -> Cell:
    """Return the results of one player's episodes in one environment, or in several.

    Args:
        env: Name of the environment.
        column: The player.
        episodes: All attempts, including failed ones.
        num_attempts: Planned attempts per task.
        says_success: Whether the environment ever reports ``success``. If so, an episode without it
            counts as unsuccessful.
        clusters: Cluster of each task. None means no clusters.
    """
    good = [e for e in episodes if not e.failed]
    failed = [e for e in episodes if e.failed]
    ended = {e.ticket for e in good}
    wins = wins_of(good)
    scores = by_task(good, _task, lambda e: e.score or 0.0)
    played = bool(good) and not _without_a_turn(good)
    measured = says_success and played
    return Cell(
        env=env,
        column=column,
        num_tasks=len(scores),
        num_attempts=num_attempts,
        success=clustered_share(wins, clusters) if measured else None,
        score=clustered_mean(scores, clusters) if played else None,
        rewards=named_means(good, _task, lambda e: e.rewards, clusters) if played else {},
        pass_at=pass_estimates(wins, num_attempts, clusters) if measured else {},
        num_episodes=len(good),
        num_failed=len({e.ticket for e in failed} - ended),
        failures=dict(Counter(str(e.failure) for e in failed)),
        num_truncated=sum(e.status == "truncated" for e in good),
        mean_turns=_mean([float(e.num_turns) for e in good]),
        mean_loss_tokens=_mean([float(e.num_loss_tokens) for e in good]),
        why=_why(good, failed, says_success=says_success),
    )


def wins_of(episodes: Iterable[Episode]) -> dict[object, list[float]]:
    """Return 1 for each success and 0 for each other completed episode, by task."""
    return by_task(episodes, _task, lambda e: float(bool(e.success)))


def commonest_failure(episodes: Iterable[Episode]) -> str:
    """Return the most common failure message. Empty if no attempt failed."""
    return next((w for w, _ in Counter(e.why for e in episodes if e.failed).most_common(1)), "")


def plain_estimate(estimate: Estimate | None) -> dict[str, float | int | None] | None:
    """Return an estimate as JSON. Values that are not finite become null."""
    if estimate is None:
        return None
    return {k: v if math.isfinite(v) else None for k, v in estimate.as_dict().items()}


def _why(good: Sequence[Episode], failed: Sequence[Episode], *, says_success: bool) -> str:
    if good and _without_a_turn(good):
        return NO_TURN
    if good:
        return "" if says_success else SAYS_NOTHING
    if failed:
        return f"every episode failed: {commonest_failure(failed)}"
    return "not played"


def _without_a_turn(good: Sequence[Episode]) -> bool:
    return all(e.status == "truncated" and not e.num_turns for e in good)


def _task(episode: Episode) -> object:
    return episode.env, episode.split, episode.task


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def pass_at_k(num_attempts: int, num_right: int, k: int) -> float:
    """Return the unbiased probability that at least one of ``k`` attempts is right.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ValueError: If there are fewer than ``k`` attempts, or more right ones than attempts.
    """
    if not 1 <= k <= num_attempts or not 0 <= num_right <= num_attempts:
        raise ValueError(f"pass@{k} of {num_right} right in {num_attempts} attempts")
    wrong = math.comb(num_attempts - num_right, k)
    return float(1 - Fraction(wrong, math.comb(num_attempts, k)))


def ks_of(num_attempts: int) -> tuple[int, ...]:
    """Return the reported k's: powers of two up to the number of attempts, and that number."""
    powers = (2**i for i in range(num_attempts.bit_length()))
    return tuple(sorted({k for k in powers if k <= num_attempts} | {num_attempts}))


def pass_estimates(
    attempts_by_task: Mapping[object, Sequence[float]],
    num_attempts: int,
    clusters: Clusters | None = None,
) -> dict[int, Estimate]:
    """Return pass@k for each k of :func:`ks_of`. ``n`` counts tasks.

    Args:
        attempts_by_task: 1 for each right attempt, 0 for each wrong one.
        num_attempts: Planned attempts per task. A task with fewer completed attempts is only in
            pass@k for k up to that number.
        clusters: Cluster of each task. None means no clusters.
    """
    found = {}
    for k in ks_of(num_attempts):
        counts = {t: (len(v), round(sum(v))) for t, v in attempts_by_task.items() if len(v) >= k}
        chances = {task: [pass_at_k(n, c, k)] for task, (n, c) in counts.items()}
        found[k] = clustered_share(chances, clusters)
    return found
