"""The cells of an evaluation's table: one environment, one player, its success, score and pass@k.

Takes: episodes. Gives: :class:`Cell` records, and pass@k without bias and with 95% intervals.
Never: counts a failed episode as one that was not solved, shows 0 where nothing was measured, or
counts attempts at one task as if they were independent tasks.
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
)

NO_TURN = (
    "every episode was truncated before its first turn, so nothing was measured: the first prompt "
    "has no room (rollout.max_context_tokens, or the server's own limit)"
)
SAYS_NOTHING = "the environment does not say what success is"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one player reached in one environment."""

    env: str
    column: str
    num_tasks: int = 0
    """Of which an episode came to an end."""
    num_attempts: int = 0
    """That each task was given."""
    success: Estimate | None = None
    """Clustered by the environment's clusters of tasks, or by task; None: nothing was measured."""
    score: Estimate | None = None
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """By k, over tasks."""
    num_episodes: int = 0
    """That came to an end."""
    num_failed: int = 0
    """That did not, in spite of retries; no part of any estimate."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> attempts that failed; most were made again."""
    num_truncated: int = 0
    mean_turns: float | None = None
    mean_loss_tokens: float | None = None
    why: str = ""
    """Why there is no success, or no figure at all."""

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {
            "env": self.env,
            "column": self.column,
            "tasks": self.num_tasks,
            "attempts_per_task": self.num_attempts,
            "success": plain_estimate(self.success),
            "score": plain_estimate(self.score),
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
    """Return what the episodes of one player in one environment, or several, come to.

    Args:
        env: The environment's name.
        column: The player.
        episodes: All attempts, failed ones too.
        num_attempts: That each task was given.
        says_success: Whether the environment ever says ``success``: then an episode that does not
            was none.
        clusters: Which tasks belong together; None: none do.
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
    """Return 1 for each success and 0 for each other end, by task."""
    return by_task(episodes, _task, lambda e: float(bool(e.success)))


def commonest_failure(episodes: Iterable[Episode]) -> str:
    """Return what failed attempts said most often; empty when none failed."""
    return next((w for w, _ in Counter(e.why for e in episodes if e.failed).most_common(1)), "")


def plain_estimate(estimate: Estimate | None) -> dict[str, float | int | None] | None:
    """Return an estimate as JSON: what is not finite is null."""
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
    """Return the chance that one of ``k`` attempts is right, without bias.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ValueError: When there are fewer than ``k`` attempts, or more right ones than attempts.
    """
    if not 1 <= k <= num_attempts or not 0 <= num_right <= num_attempts:
        raise ValueError(f"pass@{k} of {num_right} right in {num_attempts} attempts")
    wrong = math.comb(num_attempts - num_right, k)
    return float(1 - Fraction(wrong, math.comb(num_attempts, k)))


def ks_of(num_attempts: int) -> tuple[int, ...]:
    """Return the k's that are reported: powers of two up to the attempts, and all attempts."""
    powers = (2**i for i in range(num_attempts.bit_length()))
    return tuple(sorted({k for k in powers if k <= num_attempts} | {num_attempts}))


def pass_estimates(
    attempts_by_task: Mapping[object, Sequence[float]],
    num_attempts: int,
    clusters: Clusters | None = None,
) -> dict[int, Estimate]:
    """Return pass@k for each k of :func:`ks_of`; ``n`` counts tasks.

    Args:
        attempts_by_task: 1 for each attempt that was right, 0 for each that was not.
        num_attempts: Attempts that each task was given; one with fewer that came to an end is
            part of those k's alone that they suffice for.
        clusters: Which tasks belong together; None: none do.
    """
    found = {}
    for k in ks_of(num_attempts):
        counts = {t: (len(v), round(sum(v))) for t, v in attempts_by_task.items() if len(v) >= k}
        chances = {task: [pass_at_k(n, c, k)] for task, (n, c) in counts.items()}
        found[k] = clustered_share(chances, clusters)
    return found
