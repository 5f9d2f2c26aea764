"""What a run comes to in each of its environments, where it ran, and why there.

    recorder: finished, trained, failed    evaluations: success, score
    router:   which pool generated         placement:   which was planned, and the mapper's reasons

Takes: a run and what its parts have counted. Gives: the section ``envs`` of a report. Never:
counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.hardware import TRAINER_REASON, Placement
from rollart_core.runtime.report import Sampled, score_gain

Routed = Mapping[str, Mapping[str, int]]
"""Env -> pool -> conversations that began there, evaluations included."""


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
