"""Where and how rewards are computed: the section ``scoring`` and its checks.

Takes: plain mappings, and for the checks the specs of rewards and backends. Gives: the section, and
problems. Never: builds a reward or a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from rollart_core.config.base import (
    Fraction,
    NonNegative,
    Number,
    PluginRef,
    PositiveInt,
    Seconds,
    Section,
)
from rollart_core.config.problems import Problem
from rollart_core.contracts.reward import RewardBackendSpec, RewardSpec

if TYPE_CHECKING:
    from rollart_core.config.run import RunConfig


class Hedge(Section):
    """When a slow call is repeated concurrently (hedged requests)."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """A call is slow if it takes longer than this quantile of the last calls."""
    least_s: Seconds = 0.1
    """Minimum seconds before a second call. At least 20 finished calls are needed too."""
    max_share: Fraction = 0.1
    """Maximum number of second calls per first call, so that a slow backend is not overloaded."""


class Breaker(Section):
    """Circuit breaker: when a failing backend is not called for a while."""

    failures: PositiveInt = 5
    """Number of consecutive failed calls that open the circuit breaker for ``open_s``."""
    open_s: Seconds = 2.0
    """Seconds without calls. Then one call tries the backend, and if it fails, the breaker stays
    open for as long again."""


class Scoring(Section):
    """Where and how the reward is computed."""

    backend: PluginRef | None = None
    """Backend that runs the reward (`rollart list reward_backends`). Default: `pool`. It is
    `inline` if every reward of the run declares that it needs no process, or if one must stay in
    this process."""
    fallback: PluginRef | None = None
    """Backend that is used while the circuit breaker of ``backend`` is open or ``backend`` is
    unreachable. If not set, scores wait."""
    success_from: Number = 1.0
    """An episode is a success if its reward is at least this value, or the reward's component
    ``success`` if it has one. Used if the environment leaves success to the reward."""
    overlap: bool = True
    """Whether a trajectory that is being scored frees its slot of ``rollout.max_concurrent``. If
    false, the next episode waits for the score."""
    max_concurrent: PositiveInt = 32
    """Maximum number of concurrent calls per reward. Other calls wait, and their time limit has not
    started."""
    batch_size: PositiveInt = 1
    """Maximum number of trajectories per call. A call of a group reward always has one whole
    group."""
    batch_wait_s: NonNegative = 0.0
    """Seconds that a call waits for more trajectories. 0 takes those that are ready."""
    try_s: Seconds | None = None
    """Maximum seconds for one try. Default: ``deadlines.reward_s``, which all tries share."""
    max_tries: PositiveInt = 6
    """Maximum number of calls for one score, without hedges. Only errors that may be temporary are
    retried: an unreachable backend, a timeout, an invalid answer."""
    backoff_s: Seconds = 0.2
    """Maximum seconds before the second try. It doubles for each further try. The wait is a random
    share of it."""
    max_backoff_s: Seconds = 5.0
    """Upper limit of the backoff in seconds."""
    hedge: Hedge | None = None
    """Hedging of slow calls. If not set, no call is repeated concurrently."""
    breaker: Breaker | None = Breaker()
    """Circuit breaker. If null, a backend is called however often it fails."""

    @field_validator("backend", mode="before")
    @classmethod
    def _default_backend(cls, value: object) -> object:
        """Give options without an id to the pool."""
        if isinstance(value, dict) and "id" not in value:
            return {"id": "pool", **value}
        return value

    def backend_for(self, rewards: Sequence[RewardSpec]) -> PluginRef:
        """Return the configured backend, or the one that the rewards need."""
        if self.backend is not None:
            return self.backend
        stays = all(spec.runs_on == "inline" for spec in rewards)
        return PluginRef(id="inline" if stays or not all(r.stateless for r in rewards) else "pool")


def scoring_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield contradictions in ``scoring``, and keys that have no effect."""
    scoring = config.scoring
    given = scoring.model_fields_set
    limit = config.deadlines.reward_s
    if scoring.try_s is not None and scoring.try_s >= limit:
        message = f"{scoring.try_s:g} s: must be shorter than deadlines.reward_s ({limit:g} s)"
        yield Problem(("scoring", "try_s"), message)
    if scoring.max_tries == 1:
        for name in ("backoff_s", "max_backoff_s"):
            if name in given:
                message = "has no effect with max_tries: 1; remove it"
                yield Problem(("scoring", name), message)
    elif scoring.max_backoff_s < scoring.backoff_s:
        message = f"{scoring.max_backoff_s:g} s: must not be below backoff_s"
        yield Problem(("scoring", "max_backoff_s"), message)
    if scoring.batch_size == 1 and "batch_wait_s" in given:
        message = "has no effect with batch_size: 1; remove it"
        yield Problem(("scoring", "batch_wait_s"), message)
    if scoring.fallback is not None and scoring.fallback == scoring.backend:
        message = "is the same as the backend: use another one, or remove it"
        yield Problem(("scoring", "fallback"), message)


def idle_scoring(config: RunConfig, rewards: Sequence[object]) -> Iterator[Problem]:
    """Yield that the section has no effect if no environment of the run has a reward."""
    own = config.env if isinstance(config.env, tuple) else ()
    asked = config.reward or any(entry.run.reward for entry in own)
    if "scoring" in config.model_fields_set and not asked and not any(rewards):
        message = "has no effect without a reward: environments compute scores; remove it"
        yield Problem(("scoring",), message)


def with_effect(scoring: Scoring, rewards: Sequence[RewardSpec]) -> dict[str, object]:
    """Return the section as plain data, without the keys that have no effect in this run."""
    data: dict[str, object] = scoring.model_dump(mode="json")
    idle = {"backoff_s", "max_backoff_s"} if scoring.max_tries == 1 else set()
    if all(spec.group for spec in rewards):
        idle |= {"batch_size", "batch_wait_s"}
    elif scoring.batch_size == 1:
        idle |= {"batch_wait_s"}
    return {key: value for key, value in data.items() if key not in idle}


def reward_problems(
    scoring: Scoring, rewards: Sequence[RewardSpec], backends: Sequence[RewardBackendSpec]
) -> Iterator[Problem]:
    """Yield rewards that cannot run on their backend or with these settings.

    Args:
        scoring: The section.
        rewards: Rewards of the run and of its environments.
        backends: The backend, and the fallback if there is one.
    """
    if scoring.backend is None and len({spec.id for spec in backends}) < len(backends):
        message = f"is the same as the backend ({backends[0].id}): use another one, or remove it"
        yield Problem(("scoring", "fallback"), message)
    for reward in {spec.id: spec for spec in rewards}.values():
        if reward.group and not scoring.overlap:
            message = f"false: {reward.id} scores whole groups, so members would wait forever"
            yield Problem(("scoring", "overlap"), message)
        for key, backend in zip(("backend", "fallback"), backends, strict=False):
            if not reward.stateless and not backend.in_process:
                message = (
                    f"{backend.id} uses other processes, and {reward.id} is not stateless: "
                    "use inline"
                )
                yield Problem(("scoring", key), message)
    if rewards and all(spec.group for spec in rewards) and "batch_size" in scoring.model_fields_set:
        message = "has no effect on rewards that score whole groups; remove it"
        yield Problem(("scoring", "batch_size"), message)
