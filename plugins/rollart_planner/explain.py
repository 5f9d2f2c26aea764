"""Why a placement is what it is: a sentence for each decision, and what holds the rate down.

Takes: what the planner chose from and what it chose. Gives: sentences for people. Never: decides.
"""

from __future__ import annotations

from rollart_core.contracts.hardware import TRAINER_REASON, Placement
from rollart_planner.fit import Fit, FitMethod
from rollart_planner.optimum import Solution
from rollart_planner.program import BUSY, ENGINES, EPISODES, TRAINING

FEW = 0.03
"""What would raise the rate by less than this share of its own growth is not named."""


def reasons(fit: Fit, solution: Solution, placement: Placement) -> tuple[str, ...]:
    """Return why everything is where it is."""
    sentences = [_engines_sentence(fit, solution, env_id) for env_id in fit.workloads]
    sentences += [_envs_sentence(fit, placement), _trainer_sentence(fit, placement)]
    if placement.rewards != "inline":
        sentences.append(f"rewards are stateless and run on {placement.rewards}")
    if fit.demand.model is None:
        sentences.append(
            f"the model's size is not known: reckoned with {fit.model.num_params / 1e9:.2g} "
            "billion parameters"
        )
    return tuple(sentences)


def bottleneck(solution: Solution) -> str:
    """Return what holds the rate down, the most first."""
    gains = sorted(solution.gains.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{_spelled(label)} ({gain:.0%})" for label, gain in gains if gain > FEW]
    return ", ".join(named) or "nothing in particular"


def _spelled(label: str) -> str:
    kind, _, of = label.partition(" of ")
    if kind == BUSY:
        return f"engines on {of}"
    return {
        EPISODES: "episodes at once (rollout.max_concurrent)",
        TRAINING: "the trainer",
        ENGINES: "engines (runtime.num_engines)",
    }.get(kind, label)


def _engines_sentence(fit: Fit, solution: Solution, env_id: str) -> str:
    ways = [way for way in solution.ways if way.env_id == env_id]
    rates: dict[str, float] = {}
    for way in ways:
        rates[way.pool] = rates.get(way.pool, 0.0) + solution.ways[way]
    total = sum(rates.values())
    parts = [f"{rate / total:.0%} on {pool}" for pool, rate in sorted(rates.items())]
    main = max(ways, key=lambda way: (solution.ways[way], way.pool, way.batch))
    return f"{env_id} generates {' and '.join(parts)}: {_character(main)}{_compared(fit, main)}"


def _character(way: FitMethod) -> str:
    """Say what a turn of the env is made of, where most of it is generated."""
    turn = way.turn
    share = turn.prefill_s / turn.total_s if turn.total_s else 0.0
    kind = "prefill-heavy" if share > 0.5 else "decode-heavy"
    by_compute = turn.prefill_by_compute if share > 0.5 else turn.decode_by_compute
    bound = "arithmetic" if by_compute else "memory bandwidth"
    return f"{kind} ({share:.0%} prefill there), held down by {bound}"


def _compared(fit: Fit, main: FitMethod) -> str:
    """Say how much longer the other pools would take for a trajectory, at their best."""
    best: dict[str, float] = {}
    for way in fit.ways:
        if way.env_id == main.env_id:
            best[way.pool] = min(best.get(way.pool, way.engine_s), way.engine_s)
    mine = best.pop(main.pool)
    others = [f"{pool} {seconds / mine:.2g} times" for pool, seconds in best.items()]
    num = fit.demand.engine_devices
    what = "a device" if num == 1 else f"an engine on {num} devices"
    return f"; for a trajectory {what} of {main.pool} takes {mine:.2g} s" + (
        f", of {', of '.join(others)} that" if others else ""
    )


def _envs_sentence(fit: Fit, placement: Placement) -> str:
    pools = sorted(set(placement.envs.values()))
    cores = {p: [e for e, at in placement.envs.items() if at == p] for p in pools}
    if len(pools) == 1:
        return f"environments run on {pools[0]} ({fit.pools[pools[0]].device})"
    return "environments run on " + ", ".join(
        f"{pool} ({', '.join(sorted(names))})" for pool, names in cores.items()
    )


def _trainer_sentence(fit: Fit, placement: Placement) -> str:
    ranks, pool = fit.demand.num_trainer_ranks, placement.trainer
    rate = ranks / fit.training_s(pool)
    devices = "a device" if ranks == 1 else f"{ranks} devices"
    return (
        f"{TRAINER_REASON} has {devices} of {pool} to itself, enough for {rate:.3g} trajectories/s"
    )
