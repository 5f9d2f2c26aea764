"""Compute placements: the fastest, the best for its price, and the expected rates of any placement.

Takes: workloads, pools, a demand. Gives: a :class:`Placement` with expected rates, and reasons: a
sentence for each decision, and what limits the rate. Never: accesses a cluster; it uses the
estimates of :mod:`rollart_planner.roofline`.

A low number of concurrent episodes can limit the rate (:func:`steady_rate`). The program of a
placement lets each environment on a pool have its own batch size, and the shares of time add up. In
a real engine, the rows of all environments share one batch, also during another's prefill. So, with
fixed shares, the rate is computed again:

    b(rate)   smallest batch with which an engine keeps up: sum of rates engine_s(b) <= 1
    rate      largest with sum of engines b(rate) + rate outside_s <= max_concurrent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import (
    TRAINER_REASON,
    Demand,
    Expectation,
    Placement,
    Pool,
    VersionTime,
)
from rollart_planner.fit import Fit, FitMethod, everywhere, fit
from rollart_planner.optimum import Optimum, Solution
from rollart_planner.program import BUSY, ENGINES, EPISODES, TRAINING, Program
from rollart_planner.publication import batch_rate, version_time

EPISODE_FACTORS = (0.5, 0.75, 1.5, 1000.0)
"""Numbers of concurrent episodes to try, relative to the demand. If episodes limit the rate, the
program overestimates their batches (see :func:`steady_rate`), so shares for another number of
episodes may be better."""
LEAST_SHARE = 1e-4
"""Smaller shares of an env's trajectories are rounding errors and are dropped."""

FEW = 0.03
"""A limit that would raise the rate by less than this share of its own growth is not named."""


def fastest(workloads: Mapping[str, Workload], pools: Sequence[Pool], demand: Demand) -> Placement:
    """Return the placement with the most trajectories/s.

    Raises:
        ValueError: If something of the run fits no pool.
        UserError: If scipy is not installed.
    """
    found = fit(workloads, pools, demand)
    if demand.colocates:
        return max(map(_fastest, _on_one_pool(found)), key=_rate)
    return _fastest(found)


def _on_one_pool(found: Fit) -> list[Fit]:
    """Return the ways to run trainer and engines on the same pool, for each such pool."""
    pools = [p for p in found.trainer_pools if any(way.pool == p for way in found.ways)]
    if not pools:
        raise ValueError(
            "runtime.colocate needs a pool that may run both trainer and engines: add engines and "
            "trainer to the roles of one"
        )
    return [
        replace(found, trainer_pools=(pool,), ways=tuple(w for w in found.ways if w.pool == pool))
        for pool in pools
    ]


def _fastest(found: Fit) -> Placement:
    workloads, pools, demand = found.workloads, list(found.pools.values()), found.demand
    solution = _solved(found)
    best = _placement(found, solution)
    if EPISODES not in solution.gains:
        return best
    for factor in EPISODE_FACTORS:
        num = max(1, int(demand.max_concurrent * factor))
        other = replace(found, demand=replace(demand, max_concurrent=num))
        placement = _placement(other, _solved(other))
        placement = replace(placement, expected=expect(placement, workloads, pools, demand))
        best = max(best, placement, key=_rate)
    return best


def _solved(found: Fit) -> Solution:
    try:
        return Optimum(Program(found)).solve()
    except ValueError:
        return Optimum(Program(found, crowded=True)).solve()


def _rate(placement: Placement) -> float:
    return placement.expected.trajectories_per_s if placement.expected else 0.0


def best_value(
    workloads: Mapping[str, Workload], pools: Sequence[Pool], demand: Demand
) -> Placement:
    """Return the placement with the most trajectories for the price of the devices that it uses.

    Raises:
        ValueError: If something of the run fits no pool, or no pool has a price.
        UserError: If scipy is not installed.
    """
    found = fit(workloads, pools, demand)
    if not any(pool.price_per_hour for pool in found.pools.values()):
        raise ValueError("no pool has a price: set price_per_hour in the cluster file")
    fits = _on_one_pool(found) if demand.colocates else [found]
    return max((_placement(one, Optimum(Program(one)).best_value()) for one in fits), key=_rate)


def expect(
    placement: Placement,
    workloads: Mapping[str, Workload],
    pools: Sequence[Pool],
    demand: Demand,
) -> Expectation:
    """Return the expected rates of a placement from any source.

    Raises:
        ValueError: If it cannot run: a pool does not exist, or the model does not fit.
        UserError: If scipy is not installed.
    """
    found = everywhere(workloads, pools, demand)
    _check_names(placement, found)
    solution = Optimum(Program(found, fixed=placement, crowded=True)).solve()
    return _expectation(found, solution, placement.engines)


def _placement(found: Fit, solution: Solution) -> Placement:
    engines = {env_id: _shares(solution, env_id) for env_id in found.workloads}
    placement = Placement(
        envs=solution.env_pools,
        engines=engines,
        trainer=solution.trainer,
        rewards=found.reward_pool or "inline",
        num_engines=_engines(found, solution, engines),
        expected=_expectation(found, solution, engines),
    )
    return replace(placement, reasons=reasons(found, solution, placement))


def _engines(
    found: Fit, solution: Solution, shares: Mapping[str, Mapping[str, float]]
) -> dict[str, int]:
    """Return pool -> number of engines, including engines that the rate does not need.

    Additional engines go to the busiest pools that have free devices.
    """
    used = {pool for env_id in shares for pool in shares[env_id]}
    engines = {p: max(1, n) for p, n in sorted(solution.engines.items()) if p in used}
    asked = found.demand.num_engines
    while asked is not None and sum(engines.values()) < asked:
        ranks = {solution.trainer: found.demand.num_trainer_ranks}
        group = found.demand.engine_devices
        free_pools = [
            p
            for p, n in engines.items()
            if group * (n + 1) + ranks.get(p, 0) <= found.pools[p].count
        ]
        if not free_pools:
            break
        busy = max(free_pools, key=lambda pool: solution.used[pool] / engines[pool])
        engines[busy] += 1
    return engines


def _shares(solution: Solution, env_id: str) -> dict[str, float]:
    """Return pool -> share of the env's trajectories, sorted by pool name."""
    rates: dict[str, float] = {}
    for way, rate in solution.ways.items():
        if way.env_id == env_id:
            rates[way.pool] = rates.get(way.pool, 0.0) + rate
    kept = {p: r for p, r in sorted(rates.items()) if r > LEAST_SHARE * sum(rates.values())}
    return {pool: rate / sum(kept.values()) for pool, rate in kept.items()}


def _expectation(
    found: Fit, solution: Solution, shares: Mapping[str, Mapping[str, float]]
) -> Expectation:
    turns: dict[str, dict[str, tuple[float, float]]] = {}
    busiest: dict[tuple[str, str], float] = {}
    for way, rate in solution.ways.items():
        if rate > busiest.get((way.env_id, way.pool), 0.0):
            busiest[way.env_id, way.pool] = rate
            turn = (way.turn.prefill_s, way.turn.decode_s)
            turns.setdefault(way.env_id, {})[way.pool] = turn
    engines = {pool: max(1, n) for pool, n in solution.engines.items()}
    steady = steady_rate(found, shares, engines, solution.rate)
    rate, limit, version, free = _with_batches(found, solution, shares, steady)
    slower = rate / steady if steady else 1.0
    counts = {name: pool.count for name, pool in found.pools.items()}
    return Expectation(
        trajectories_per_s=rate,
        envs={e: share * rate for e, share in found.weights.items()},
        pools={p: slower * solution.used.get(p, 0.0) / count for p, count in counts.items()},
        turn_s=turns,
        bottleneck=limit or bottleneck(solution),
        price_per_hour=_price(found, solution),
        version=version,
        free_versions_per_s=free,
    )


BATCH_LIMITS: Mapping[str, str] = {
    "trainer": "the trainer (training and publication alternate)",
    "engines": "engines (they stop while they load weights)",
    "batch": "the longest trajectory of a batch (raise max_staleness)",
}


def _with_batches(
    found: Fit, solution: Solution, shares: Mapping[str, Mapping[str, float]], steady: float
) -> tuple[float, str, VersionTime | None, float]:
    """Return the rate with batches and new versions, what limits it, and the cost of versions.

    The last is the time of a version, and the rate if it were 0.
    """
    demand, trainer = found.demand, solution.trainer
    if not demand.batch_trajectories or steady <= 0:
        return steady, "", None, 0.0
    used = {pool for env_id in shares for pool in shares[env_id]}
    engines = {pool: max(1, solution.engines.get(pool, 1)) for pool in sorted(used)}
    version = version_time(found.model, found.pools[trainer], list(engines), found.pools, demand)
    training_s = found.training_s(trainer) / demand.num_trainer_ranks
    busy = max(solution.used[p] / (demand.engine_devices * n) for p, n in engines.items())
    capacity = max(steady, solution.rate / min(1.0, max(busy, 1e-9)))
    ways = _by_pool(found, shares)

    def limited(version: VersionTime) -> tuple[float, str]:
        residents = partial(_residents, found, ways, shares, engines)
        return batch_rate(residents, capacity, training_s, version, demand)

    rate, limit = limited(version)
    free = min(steady, limited(replace(version, trainer_s=0.0, stall_s=0.0))[0])
    if rate >= steady * (1 - FEW):
        return min(steady, rate), "", version, free
    said = BATCH_LIMITS[limit]
    if demand.colocates:
        said = said.partition(" (")[0] + " (trainer and engines take turns)"
    return rate, said, version, free


def _price(found: Fit, solution: Solution) -> float:
    return sum(found.pools[p].price_per_hour * n for p, n in solution.devices.items())


def _check_names(placement: Placement, found: Fit) -> None:
    """Reject a placement that omits an env, or names a pool that does not exist."""
    for env_id in found.workloads:
        if env_id not in placement.envs or env_id not in placement.engines:
            raise ValueError(f"the placement has no entry for {env_id}")
    named = {*placement.envs.values(), placement.trainer}
    named |= {pool for shares in placement.engines.values() for pool in shares}
    if unknown := sorted(named - set(found.pools)):
        raise ValueError(
            f"the placement names {', '.join(unknown)}, but the cluster has "
            f"{', '.join(found.pools)}: use one of these, or add the pool"
        )


def reasons(fit: Fit, solution: Solution, placement: Placement) -> tuple[str, ...]:
    """Return the reason for each decision, one sentence each."""
    sentences = [_engines_sentence(fit, solution, env_id) for env_id in fit.workloads]
    sentences += [_envs_sentence(fit, placement), _trainer_sentence(fit, placement)]
    if placement.rewards != "inline":
        sentences.append(f"rewards are stateless and run on {placement.rewards}")
    if fit.demand.model is None:
        sentences.append(
            f"the model's size is unknown: assumed {fit.model.num_params / 1e9:.2g} "
            "billion parameters"
        )
    return tuple(sentences)


def bottleneck(solution: Solution) -> str:
    """Return what limits the rate, the strongest limit first."""
    gains = sorted(solution.gains.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{_spelled(label)} ({gain:.0%})" for label, gain in gains if gain > FEW]
    return ", ".join(named) or "nothing in particular"


def _spelled(label: str) -> str:
    kind, _, of = label.partition(" of ")
    if kind == BUSY:
        return f"engines on {of}"
    return {
        EPISODES: "concurrent episodes (rollout.max_concurrent)",
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
    """Describe a turn of the env on the pool where most of it is generated."""
    turn = way.turn
    share = turn.prefill_s / turn.total_s if turn.total_s else 0.0
    kind = "prefill-heavy" if share > 0.5 else "decode-heavy"
    by_compute = turn.prefill_by_compute if share > 0.5 else turn.decode_by_compute
    bound = "arithmetic" if by_compute else "memory bandwidth"
    return f"{kind} ({share:.0%} prefill there), limited by {bound}"


def _compared(fit: Fit, main: FitMethod) -> str:
    """Compare the best engine seconds per trajectory of the other pools with this one."""
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
    share = "in turns with the engines" if fit.demand.colocates else "to itself"
    return f"{TRAINER_REASON} has {devices} of {pool} {share}, enough for {rate:.3g} trajectories/s"


STEPS = 40
"""Bisection steps for the rate."""


def steady_rate(
    fit: Fit,
    shares: Mapping[str, Mapping[str, float]],
    num_engines: Mapping[str, float],
    most: float,
) -> float:
    """Return trajectories/s.

    Args:
        fit: The possible ways to run.
        shares: Env id -> pool -> share of its trajectories.
        num_engines: Pool -> number of engines.
        most: An upper bound of the rate.
    """
    ways = _by_pool(fit, shares)
    if _residents(fit, ways, shares, num_engines, most) <= fit.demand.max_concurrent:
        return most
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        fits = _residents(fit, ways, shares, num_engines, middle) <= fit.demand.max_concurrent
        low, high = (middle, high) if fits else (low, middle)
    return low


_Ways = Mapping[str, Mapping[int, Mapping[str, FitMethod]]]
"""Pool -> batch -> env id -> way."""


def _by_pool(fit: Fit, shares: Mapping[str, Mapping[str, float]]) -> _Ways:
    """Return the ways of each pool.

    If an environment has no way of a size, because its rows fill the memory earlier, it is as fast
    as with its largest: few of the rows are its own.
    """
    found: dict[str, dict[str, dict[int, FitMethod]]] = {}
    for way in fit.ways:
        if shares[way.env_id].get(way.pool, 0.0) > 0:
            found.setdefault(way.pool, {}).setdefault(way.env_id, {})[way.batch] = way
    return {
        pool: {
            size: {
                env_id: ways[max((b for b in ways if b <= size), default=min(ways))]
                for env_id, ways in by_env.items()
            }
            for size in sorted({b for ways in by_env.values() for b in ways})
        }
        for pool, by_env in found.items()
    }


def _residents(
    fit: Fit,
    ways: _Ways,
    shares: Mapping[str, Mapping[str, float]],
    num_engines: Mapping[str, float],
    rate: float,
) -> float:
    """Return the number of concurrent episodes, inside engines and outside."""
    total = rate * fit.outside_s()
    for pool, batches in ways.items():
        num = max(1e-9, num_engines.get(pool, 0.0))
        rates = {e: rate * fit.weights[e] * shares[e].get(pool, 0.0) / num for e in fit.weights}
        total += num * _batch(batches, rates)
    return total


def _batch(batches: Mapping[int, Mapping[str, FitMethod]], rates: Mapping[str, float]) -> float:
    """Return the smallest batch that keeps up with the rates of one engine.

    Between the sizes of the ways, device seconds are interpolated as ``a + b / batch``.
    """
    busy = {
        batch: sum(rates[env_id] * way.engine_s for env_id, way in by_env.items())
        for batch, by_env in sorted(batches.items())
    }
    before, before_busy = 0, 0.0
    for batch, share in busy.items():
        if share <= 1:
            if not before:
                return share * batch
            slope = (before_busy - share) / (1 / before - 1 / batch)
            return 1 / (1 / batch + (1 - share) / slope) if slope > 0 else float(batch)
        before, before_busy = batch, share
    return float(max(busy, default=0))
