"""The result of a run: the object that ``--json`` prints and ``report.json`` keeps.

    recorder: finished, trained, failed    evaluations: success, score
    router:   which pool generated         placement:   the plan, and the mapper's reasons

Takes: numbers; a run and what its workers have counted. Gives: :class:`RunReport`, and its section
``envs``: the result in each environment, where it ran, and why there. Never: counts or renders.
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
"""Before and after."""
EstimateDict = Mapping[str, float | int]

Routed = Mapping[str, Mapping[str, int]]
"""Env -> pool -> conversations that began there, evaluations included."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, finished or stopped."""

    run_dir: str
    name: str
    stop_reason: str
    ok: bool
    """False when the run stopped itself or was interrupted."""
    train_steps: int
    """Updates taken: ``skipped_updates`` are not among them."""
    batches: int
    """Weight publications of the RL phase."""
    wall_s: float
    """All of it."""
    train_wall_s: float
    """The RL phase alone."""
    tokens_per_s: float
    """Tokens of finished trajectories, prompt and generated, per second of the RL phase."""
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    staleness: Mapping[str, int]
    """Versions -> trained samples."""
    failures: Mapping[str, int]
    """Kind -> failed attempts of the RL phase."""
    skipped_updates: int = 0
    """Updates not taken: no sample had an advantage, a gradient was not finite or an outlier, or
    the step was too large; the metrics of each say which."""
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    """``batches``, ``train_steps`` and ``trajectories`` that were undone since the trainer was
    lost, or the guard tripped; no other count here holds them."""
    guard: Mapping[str, object] | None = None
    """``trips``, one after another, ``rollbacks`` and the ``lr_factor`` at the end; None: off."""
    scheduler: Mapping[str, object] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    greedy_before: EvaluationResult | None = None
    greedy_after: EvaluationResult | None = None
    score_gain: EstimateDict | None = None
    """Mean over tasks of score after minus score before, paired, with its 95% interval, clustered
    as those of the evaluations."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    warm_start: Mapping[str, object] | None = None
    length_bias: Mapping[str, float] = field(default_factory=dict)
    """Mean tokens and turns, dispatched against trained."""
    engine: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Engine -> what its weight swaps cost, in the RL phase."""
    placement: Mapping[str, object] = field(default_factory=dict)
    """Where the hardware mapper put everything, and why."""
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Reward -> what its scores have cost, evaluations included: calls, seconds, cold starts."""
    validations: Sequence[Mapping[str, object]] = ()
    """Those that stand: policy version, success and score with their intervals, episodes."""
    best: Mapping[str, object] | None = None
    """The best of them: ``policy_version``, ``metric``, ``value`` with its interval; of equal ones
    the latest."""
    last: Mapping[str, object] | None = None
    """The last one, likewise."""
    model_policy_version: int | None = None
    """Whose weights ``model-trained/`` holds and ``after`` measures."""
    choice: str = ""
    """How that was chosen."""
    fell: str = ""
    """By how much the last validation fell below the best, if by more than its 95% interval."""
    envs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Each environment: see :func:`env_reports`."""

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        plain = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("before", "after", "greedy_before", "greedy_after")
        }
        for name in ("before", "after"):
            sampled = getattr(self, name)
            plain[f"success_{name}"] = sampled.success.as_dict() if sampled else None
            plain[f"score_{name}"] = sampled.score.as_dict() if sampled else None
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
    """Return what a run comes to in each environment.

    Args:
        run: The run.
        totals: Env -> what became of its attempts.
        sampled: Evaluations of all environments; of a single one they are not repeated.
        ran: Says where an environment ran, and why.
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
    """Return what says where an environment ran, and why.

    Args:
        run: The run.
        placement: Its last one; None: it did not come to that.
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
    """Return the reasons that concern one environment: those that name it, and those for all.

    Args:
        placement: Where everything is, by whatever mapper.
        name: The environment.
        names: All environments of the run.
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
    """Return whether a sentence names an environment, and not one whose name it begins."""
    return re.search(rf"(?<![\w/#.-]){re.escape(name)}(?![\w/#-])", reason) is not None


def _sampled(name: str, sampled: Sampled) -> dict[str, object]:
    of_it = [r.by_env.get(name) if r else None for r in sampled]
    found: dict[str, object] = {}
    for when, result in zip(("before", "after"), of_it, strict=True):
        if result:
            found[f"success_{when}"] = result.success.as_dict()
            found[f"score_{when}"] = result.score.as_dict()
    gain = score_gain((of_it[0], of_it[1]))
    return found | ({"score_gain": gain} if gain else {})
