"""Where and how rewards are computed: the section ``scoring``, and what must hold in it.

Takes: plain mappings; for the checks the specs of rewards and backends. Gives: the section, and
problems. Never: builds a reward or a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from rollart_core.config.base import Fraction, NonNegative, PluginRef, PositiveInt, Seconds, Section
from rollart_core.config.problems import Problem
from rollart_core.contracts.reward import RewardBackendSpec, RewardSpec

if TYPE_CHECKING:
    from rollart_core.config.run import RunConfig


class Hedge(Section):
    """When a call that takes long is made a second time, beside the first."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """A call is slow when it takes longer than this share of the last ones did."""
    least_s: Seconds = 0.1
    """Never sooner than this; nor before 20 calls have shown what is usual."""
    max_share: Fraction = 0.1
    """Second calls for each first one, at most: a backend that is slow altogether is not asked
    twice as much."""


class Breaker(Section):
    """When a backend that fails is left alone."""

    failures: PositiveInt = 5
    """After so many failed calls in a row it is asked no more for ``open_s``."""
    open_s: Seconds = 2.0
    """Then one call tries it; when that fails too, for so long again."""


class Scoring(Section):
    """Where and how the reward is computed."""

    backend: PluginRef | None = None
    """What runs the reward (`rollart list reward_backends`); none: `pool`, or `inline` where every
    reward of the run says that it wants no process of its own, or one cannot leave this one."""
    fallback: PluginRef | None = None
    """What runs it while ``backend`` is left alone, or cannot be asked at all; none: scores
    wait."""
    overlap: bool = True
    """A trajectory that is being scored holds no place among ``rollout.max_concurrent``; false: it
    does, and the next episode waits for its score."""
    max_concurrent: PositiveInt = 32
    """Most calls at once, of each reward; the others wait, and their time does not run yet."""
    batch_size: PositiveInt = 1
    """Most trajectories in one call. A group reward is always asked for one whole group."""
    batch_wait_s: NonNegative = 0.0
    """How long a call waits to be filled; 0: it takes what is there."""
    try_s: Seconds | None = None
    """How long one try may take; none: ``deadlines.reward_s``, which all tries share."""
    max_tries: PositiveInt = 6
    """Calls for one score, hedges not counted. Only what may go better is tried again: an
    unreachable backend, a deadline, an answer that is none."""
    backoff_s: Seconds = 0.2
    """Most seconds before the second try; twice as many before each further one. The wait is a
    random part of it."""
    max_backoff_s: Seconds = 5.0
    """It never grows beyond this."""
    hedge: Hedge | None = None
    """None: no call is made twice."""
    breaker: Breaker | None = Breaker()
    """None: a backend is asked however often it fails."""

    @field_validator("backend", mode="before")
    @classmethod
    def _default_backend(cls, value: object) -> object:
        """Options alone are those of the pool."""
        if isinstance(value, dict) and "id" not in value:
            return {"id": "pool", **value}
        return value

    def backend_for(self, rewards: Sequence[RewardSpec]) -> PluginRef:
        """Return the backend for rewards: what is configured, or what they ask for."""
        if self.backend is not None:
            return self.backend
        stays = all(spec.runs_on == "inline" for spec in rewards)
        return PluginRef(id="inline" if stays or not all(r.stateless for r in rewards) else "pool")


def scoring_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what contradicts what in ``scoring``, and what has no effect there."""
    scoring = config.scoring
    own = () if not isinstance(config.env, tuple) else config.env
    if config.reward is None and not any(entry.run.reward for entry in own):
        if "scoring" in config.model_fields_set:
            message = "has no effect without a reward: environments score by themselves; remove it"
            yield Problem(("scoring",), message)
        return
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
        message = "is the backend itself: name another one, or remove it"
        yield Problem(("scoring", "fallback"), message)


def with_effect(scoring: Scoring, rewards: Sequence[RewardSpec]) -> dict[str, object]:
    """Return the keys of a section as plain data, without those that do nothing in this run."""
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
    """Yield which reward cannot run where, or not in this way.

    Args:
        scoring: The section.
        rewards: Of the run and of its environments.
        backends: The backend, and the fallback where there is one.
    """
    if scoring.backend is None and len({spec.id for spec in backends}) < len(backends):
        message = f"is the backend itself ({backends[0].id}): name another one, or remove it"
        yield Problem(("scoring", "fallback"), message)
    for reward in {spec.id: spec for spec in rewards}.values():
        if reward.group and not scoring.overlap:
            message = f"false: {reward.id} scores whole groups, whose members would wait in vain"
            yield Problem(("scoring", "overlap"), message)
        for key, backend in zip(("backend", "fallback"), backends, strict=False):
            if not reward.stateless and not backend.in_process:
                message = (
                    f"{backend.id} runs rewards elsewhere, and {reward.id} is not stateless: "
                    "take inline"
                )
                yield Problem(("scoring", key), message)
    if rewards and all(spec.group for spec in rewards) and "batch_size" in scoring.model_fields_set:
        message = "has no effect on rewards of whole groups; remove it"
        yield Problem(("scoring", "batch_size"), message)
