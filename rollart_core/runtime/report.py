"""The result of a run: the object that ``--json`` prints and ``report.json`` stores.

    recorder: finished, trained, failed    evaluations: success, score
    router:   pool of each conversation    placement:   the plan, and the mapper's reasons

Takes: numbers, a run and the counters of its workers. Gives: :class:`RunReport`, and its section
``envs``: the result in each environment, where it ran, and why. Never: counts or renders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.hardware import TRAINER_REASON, Placement
from rollart_core.scheduling.evaluate import EvaluationResult, paired_gain

Sampled = tuple[EvaluationResult | None, EvaluationResult | None]
"""The evaluations before and after training."""
EstimateDict = Mapping[str, float | int]

Routed = Mapping[str, Mapping[str, int]]
"""Env -> pool -> number of conversations that began there, evaluations included."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of one run, finished or stopped."""

    run_dir: str
    name: str
    stop_reason: str
    ok: bool
    """False if the run stopped because of failures or the guard, or was interrupted."""
    train_steps: int
    """Number of updates taken, without ``skipped_updates``."""
    batches: int
    """Number of weight publications in the RL phase."""
    wall_s: float
    """Seconds of the whole run."""
    train_wall_s: float
    """Seconds of the RL phase."""
    tokens_per_s: float
    """Tokens of finished trajectories, prompt and generated, per second of the RL phase."""
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    step_s: Mapping[str, float]
    """Mean seconds of the trainer per batch, by phase: ``wait`` for trajectories, ``batch`` (rows,
    advantages and signals), ``forward`` (with the loss), ``backward``, ``optimizer``, ``publish``
    (the weights) and ``other``. Empty without a batch."""
    staleness: Mapping[str, int]
    """Staleness in versions -> number of trained samples."""
    failures: Mapping[str, int]
    """Kind -> number of failed attempts in the RL phase."""
    has_signal: bool = True
    """Whether any group had an advantage. If not, the run learned nothing."""
    skipped_updates: int = 0
    """Number of updates not taken: no sample had an advantage, a gradient was not finite or was
    an outlier, or the step was too large. The metrics of each update contain the reason."""
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    """Number of ``batches``, ``train_steps`` and ``trajectories`` that were undone because the
    trainer was lost or the guard tripped; no other count in the report includes them."""
    guard: Mapping[str, object] | None = None
    """The ``trips``, ``rollbacks`` and the final ``lr_factor``; None if the guard is off."""
    scheduler: Mapping[str, object] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    greedy_before: EvaluationResult | None = None
    greedy_after: EvaluationResult | None = None
    score_gain: EstimateDict | None = None
    """Mean over tasks of score after minus score before, paired, with its 95% interval. Clusters
    are those of the evaluations."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    warm_start: Mapping[str, object] | None = None
    length_bias: Mapping[str, float] = field(default_factory=dict)
    """Mean tokens and turns of dispatched and of trained trajectories."""
    cross_check: Mapping[str, float] | None = None
    """Difference between the trainer's and the engine's logprobs before the first update; see
    :func:`rollart_core.training.cross_check.differences`. None if no answers were compared."""
    engine: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Engine -> cost of its weight swaps in the RL phase."""
    placement: Mapping[str, object] = field(default_factory=dict)
    """The placement by the hardware mapper, with its reasons."""
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Reward -> cost of its scores, evaluations included: calls, seconds, cold starts."""
    validations: Sequence[Mapping[str, object]] = ()
    """Validations that were not rolled back: policy version, success and score with their
    intervals, episodes."""
    best: Mapping[str, object] | None = None
    """The best validation: ``policy_version``, ``metric``, ``value`` with its interval. The latest
    one if several are equal."""
    last: Mapping[str, object] | None = None
    """The last validation, with the same fields."""
    model_policy_version: int | None = None
    """Policy version of the weights in ``model-trained/``, which ``after`` evaluates."""
    choice: str = ""
    """How ``model_policy_version`` was chosen."""
    fell: str = ""
    """How far the last validation is below the best, if by more than its 95% interval."""
    envs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Results of each environment; see :func:`env_reports`."""

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain JSON."""
        plain = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("before", "after", "greedy_before", "greedy_after")
        }
        for name in ("before", "after"):
            sampled = getattr(self, name)
            plain[f"success_{name}"] = sampled.success.as_dict() if sampled else None
            plain[f"score_{name}"] = sampled.score.as_dict() if sampled else None
            plain[f"rewards_{name}"] = sampled.as_dict()["rewards"] if sampled else None
            plain[f"tasks_{name}"] = len(sampled.scores) if sampled else None
            greedy = getattr(self, f"greedy_{name}")
            plain[f"greedy_{name}"] = greedy.as_dict() if greedy else None
        return plain


def score_gain(sampled: Sampled) -> EstimateDict | None:
    """Return the mean over tasks of score after minus score before, paired and clustered."""
    before, after = sampled
    if before is None or after is None:
        return None
    return paired_gain(before, after).as_dict()


def env_reports(
    run: ResolvedRun,
    totals: Mapping[str, Mapping[str, Any]],
    sampled: Sampled,
    ran: Callable[[str], Mapping[str, object]],
) -> dict[str, dict[str, object]]:
    """Return the results of a run in each environment.

    Args:
        run: The run.
        totals: Env -> counts of its attempts by outcome.
        sampled: Evaluations of all environments, by environment.
        ran: Returns where an environment ran, and why.
    """
    several = len(run.envs) > 1
    return {
        env.name: {
            **({"weight": env.weight} if several else {}),
            **totals[env.name],
            **_sampled(env.name, sampled),
            **ran(env.name),
        }
        for env in run.envs
    }


def whereabouts(
    run: ResolvedRun, placement: Placement | None, routed: Routed
) -> Callable[[str], Mapping[str, object]]:
    """Return a function that returns where an environment ran, and why.

    Args:
        run: The run.
        placement: The last placement of the run; None if the run was never placed.
        routed: See :data:`Routed`.
    """
    names = [env.name for env in run.envs]

    def ran(name: str) -> dict[str, object]:
        if placement is None:
            return {}
        planned, counts = placement.engines.get(name, {}), routed.get(name, {})
        engines = {
            pool: {
                "engine": run.engine_on(pool).spec.id,
                "planned_share": planned.get(pool, 0.0),
                "conversations": counts.get(pool, 0),
            }
            for pool in dict.fromkeys((*planned, *counts))
        }
        where = {"runtime": run.config.runtime.kind, "envs_on": placement.envs.get(name, "")}
        return {
            "ran": {**where, "engines": engines},
            "why": list(reasons_for(placement, name, names)),
        }

    return ran


def reasons_for(placement: Placement, name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the reasons that concern one environment: those that name it, and general ones.

    Args:
        placement: The placement, by any mapper.
        name: The name of the environment.
        names: The names of all environments of the run.
    """
    others = [other for other in names if other != name]

    def concerns(reason: str) -> bool:
        if _names(reason, name):
            return True
        return not any(_names(reason, other) for other in others) and not reason.startswith(
            TRAINER_REASON
        )

    return tuple(reason for reason in placement.reasons if concerns(reason))


def _names(reason: str, name: str) -> bool:
    """Return whether a sentence contains the name of an environment as a whole name."""
    return re.search(rf"(?<![\w/#.-]){re.escape(name)}(?![\w/#-])", reason) is not None


def _sampled(name: str, sampled: Sampled) -> dict[str, object]:
    of_it = [r.by_env.get(name) if r else None for r in sampled]
    found: dict[str, object] = {}
    for when, result in zip(("before", "after"), of_it, strict=True):
        if result:
            found[f"success_{when}"] = result.success.as_dict()
            found[f"score_{when}"] = result.score.as_dict()
            found[f"rewards_{when}"] = result.as_dict()["rewards"]
    gain = score_gain((of_it[0], of_it[1]))
    return found | ({"score_gain": gain} if gain else {})
