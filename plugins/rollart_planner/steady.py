"""How fast a placement runs when few episodes at once are what holds it down.

The program of a placement lets each environment on a pool have batches of its own size, and their
shares of the time add up. In truth the rows of all of them are in one engine, also while another's
prompt is read. So, once shares are known:

    b(rate)   smallest batch with which an engine keeps up: sum of rates engine_s(b) <= 1
    rate      largest with sum of engines b(rate) + rate outside_s <= max_concurrent

Takes: what may run where, shares, engines, the rate of the program. Gives: the rate that holds.
Never: more than the program's.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollart_planner.fit import Fit, FitMethod

STEPS = 40
"""Halvings of the interval in which the rate lies."""


def steady_rate(
    fit: Fit,
    shares: Mapping[str, Mapping[str, float]],
    num_engines: Mapping[str, float],
    most: float,
) -> float:
    """Return trajectories/s.

    Args:
        fit: What may run where.
        shares: Env id -> pool -> share of its trajectories.
        num_engines: Pool -> engines there.
        most: The rate with which devices are busy all the time, or less.
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

    Where an environment has none of a size, for its rows fill the memory earlier, it is as fast as
    with its largest: few of the rows are its own.
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
    """Return how many episodes there are at a time, inside engines and outside."""
    total = rate * fit.outside_s()
    for pool, batches in ways.items():
        num = max(1e-9, num_engines.get(pool, 0.0))
        rates = {e: rate * fit.weights[e] * shares[e].get(pool, 0.0) / num for e in fit.weights}
        total += num * _batch(batches, rates)
    return total


def _batch(batches: Mapping[int, Mapping[str, FitMethod]], rates: Mapping[str, float]) -> float:
    """Return the smallest batch that keeps up with the rates of one engine.

    Between the sizes there are ways for, device seconds change as ``a + b / batch`` does.
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
