"""Solve the program of a placement with scipy's HiGHS.

Takes: a :class:`~rollart_planner.program.Program`. Gives: a :class:`Solution`: the fastest, or
the one with the best rate for its price. Never: imports scipy before it solves a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollart_core.errors import UserError
from rollart_planner.fit import FitMethod
from rollart_planner.program import (
    BUSY,
    CORES,
    DEVICES,
    RATE,
    TRAINING,
    Key,
    Program,
    ProgramRow,
    choice_key,
    devices_key,
    engines_key,
    trainer_key,
    way_key,
)
from rollart_planner.roofline import engine_pool

Bounds = Mapping[Key, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution of the program; rates in trajectories/s."""

    rate: float
    ways: Mapping[FitMethod, float]
    env_pools: Mapping[str, str]
    trainer: str
    devices: Mapping[str, int]
    """Pool -> devices in use."""
    engines: Mapping[str, int]
    """Pool -> number of engines."""
    used: Mapping[str, float]
    """Pool -> device time in use, in devices. The trainer's devices count in full."""
    gains: Mapping[str, float]
    """Limit of the rate (``devices of h100``) -> gain in rate, relative to the limit's own gain."""


class Optimum:
    """A solver of one program.

    Args:
        program: The program. The solver can tighten its bounds.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fit = program.fit

    def solve(self) -> Solution:
        """Return the fastest solution.

        If engines do not limit the rate (the trainer does, for example), engines still get the
        shares with the highest generation rate, so that they have spare capacity.

        Raises:
            ValueError: If nothing can be generated.
        """
        fastest = self._maximise({RATE: 1.0})
        self._check_some(fastest)
        without = [row for row in self._program.rows if row.label != TRAINING]
        most = self._maximise({RATE: 1.0}, self._made(fastest), without)
        most = self._least_busy(most, without)
        share = min(1.0, fastest[RATE] / most[RATE])
        scaled = {k: v * share if k[0] in ("r", "z", "rate") else v for k, v in most.items()}
        return self._solution(scaled, self._gains(fastest))

    def best_value(self) -> Solution:
        """Return the solution with the best rate for its price.

        Uses Dinkelbach's method (Management Science 13(7), 1967): maximise ``rate - q price`` with
        ``q`` the ratio of the previous solution, until the ratio stops growing. Then maximise the
        rate that its devices, rounded up to whole ones, allow.
        """
        prices = {devices_key(name): pool.price_per_hour for name, pool in self._fit.pools.items()}
        found = self._maximise({RATE: 1.0})
        ratio = 0.0
        while (value := found[RATE] / max(_total(prices, found), 1e-12)) > ratio * (1 + 1e-6):
            ratio = value
            earned = {RATE: 1.0 + 1e-6} | {k: -ratio * p for k, p in prices.items()}
            found = self._maximise(earned)
        for name, pool in self._fit.pools.items():
            whole = min(float(pool.count), np.ceil(found[devices_key(name)] - 1e-6))
            self._program.bounds[devices_key(name)] = (0.0, whole)
        return self._cheapest(self._maximise({RATE: 1.0}))

    def _least_busy(self, most: dict[Key, float], rows: Sequence[ProgramRow]) -> dict[Key, float]:
        """Return the solution with at most the rate ``most`` that uses the least device time."""
        busy = {
            key: -value / self._fit.pools[row.of].count
            for row in rows
            if row.label == BUSY
            for key, value in row.coefficients.items()
            if key[0] == "r"
        }
        at = {key: (float(round(most[key])),) * 2 for key in self._program.whole}
        at[RATE] = (most[RATE] * (1 - 1e-6), 1.0)
        result = self._linear(busy, at, rows)
        return most if result.x is None else self._named(result.x)

    def _cheapest(self, fastest: Mapping[Key, float]) -> Solution:
        """Return the cheapest solution with the rate and the choices of ``fastest``."""
        self._check_some(fastest)
        gains = self._gains(fastest)
        at = self._made(fastest) | {RATE: (fastest[RATE] * (1 - 1e-7), 1.0)}
        result = self._linear(
            {key: -cost for key, cost in self._costs().items()}, at, self._program.rows
        )
        return self._solution(fastest if result.x is None else self._named(result.x), gains)

    def _check_some(self, found: Mapping[Key, float]) -> None:
        if found[RATE] < 1e-9:
            raise ValueError(
                "no device is left to generate with after the trainer takes "
                f"{self._fit.demand.num_trainer_ranks}: add devices, or lower "
                "runtime.num_trainer_ranks"
            )

    def _named(self, x: Iterable[float]) -> dict[Key, float]:
        return dict(zip(self._program.keys, map(float, x), strict=True))

    def _made(self, found: Mapping[Key, float]) -> dict[Key, tuple[float, float]]:
        """Return a solution's choices of pools for envs and trainer, as bounds."""
        chosen = [key for key in self._program.whole if key[0] != "n"]
        return {key: (float(round(found[key])),) * 2 for key in chosen}

    def _costs(self) -> dict[Key, float]:
        """Return the device price of each pool, plus a tiny price for its use."""
        pools = self._fit.pools
        least = 1e-3 * max([1e-3, *(pool.price_per_hour for pool in pools.values())])
        return {
            devices_key(name): pool.price_per_hour + least * (1 + rank / 100)
            for rank, (name, pool) in enumerate(pools.items())
        }

    def _maximise(
        self,
        objective: Mapping[Key, float],
        at: Bounds | None = None,
        rows: Sequence[ProgramRow] | None = None,
    ) -> dict[Key, float]:
        """Maximise, optionally with other bounds for some variables and without some rows."""
        program = self._program
        rows, bounds = rows or program.rows, {**program.bounds, **(at or {})}
        if all(bounds[key][0] == bounds[key][1] for key in program.whole):
            return self._found(self._linear(objective, bounds, rows))
        columns = {key: i for i, key in enumerate(program.keys)}
        low, high = zip(*(bounds[key] for key in program.keys), strict=True)
        optimize = _scipy()
        result = optimize.milp(
            c=-_vector(objective, columns),
            constraints=optimize.LinearConstraint(
                np.array([_vector(row.coefficients, columns) for row in rows]),
                [row.low for row in rows],
                [row.high for row in rows],
            ),
            bounds=optimize.Bounds(low, high),
            integrality=np.array(
                [key in self._program.whole for key in self._program.keys], dtype=int
            ),
            options={"mip_rel_gap": 0.0},
        )
        return self._found(result)

    def _found(self, result: Any) -> dict[Key, float]:
        if result.x is None:
            raise ValueError(f"the pools cannot carry the workloads: {result.message}")
        return self._named(result.x)

    def _linear(
        self,
        objective: Mapping[Key, float],
        at: Bounds,
        rows: Sequence[ProgramRow],
    ) -> Any:
        """Maximise with other bounds for some variables, including all choices."""
        columns = {key: i for i, key in enumerate(self._program.keys)}
        limits = [row for row in rows if row.low == -np.inf]
        exact = [row for row in rows if row.low == row.high]
        return _scipy().linprog(
            -_vector(objective, columns),
            A_ub=np.array([_vector(row.coefficients, columns) for row in limits]),
            b_ub=[row.high for row in limits],
            A_eq=np.array([_vector(row.coefficients, columns) for row in exact]),
            b_eq=[row.low for row in exact],
            bounds=[at.get(key, self._program.bounds[key]) for key in self._program.keys],
        )

    def _gains(self, found: Mapping[Key, float]) -> dict[str, float]:
        """Return by what share of its own growth each limit would raise the rate.

        The values are the marginals of the linear program with fixed choices and all devices of
        each available pool.
        """
        all_of = {
            devices_key(name): (self._program.bounds[devices_key(name)][1],) * 2
            for name in self._fit.pools
        }
        # A pool that runs only the trainer does not limit the rate by its devices.
        idle = {name for name in self._fit.pools if not self._works(name, found)}
        rows = [row for row in self._program.rows if row.label != DEVICES or row.of not in idle]
        result = self._linear({RATE: 1.0}, self._made(found) | all_of, rows)
        if result.x is None:
            return {}
        at = self._named(result.x)
        limits = [row for row in rows if row.low == -np.inf]
        gains: dict[str, float] = {}
        for row, marginal in zip(limits, result.ineqlin.marginals, strict=True):
            size = row.high or -_total({k: v for k, v in row.coefficients.items() if v < 0}, at)
            if (gain := -marginal * size / -result.fun) > 1e-3:
                key = f"{row.label} of {row.of}" if row.of else row.label
                gains[key] = gains.get(key, 0.0) + float(gain)
        return gains

    def _works(self, pool: str, found: Mapping[Key, float]) -> bool:
        kept = {k for k in self._program.keys if k[0] == "z" and k[-1] == pool}
        return found[engines_key(pool)] > 0.5 or any(found[key] > 1e-9 for key in kept)

    def _solution(self, found: Mapping[Key, float], gains: Mapping[str, float]) -> Solution:
        fit, group = self._fit, self._fit.demand.engine_devices
        rates = {way: max(0.0, found[way_key(way)]) for way in fit.ways}
        terms: dict[str, dict[Key, float]] = {name: {} for name in fit.pools}
        for row in self._program.rows:
            if row.label in (BUSY, CORES, DEVICES):
                each = group if row.label == BUSY else 1  # its seconds are engine seconds
                mine = {k: each * v for k, v in row.coefficients.items() if k[0] not in "nk"}
                terms[row.of] |= mine
        used = {name: _total(coefficients, found) for name, coefficients in terms.items()}
        rented = {
            name: group * found[engines_key(name)]
            + _total({k: v for k, v in terms[name].items() if k[0] in "zt"}, found)
            for name in fit.pools
        }
        return Solution(
            rate=found[RATE] * self._program.unit,
            ways={way: rate * self._program.unit for way, rate in rates.items() if rate > 1e-9},
            env_pools={
                env_id: max(fit.env_pools, key=lambda pool, e=env_id: found[choice_key(e, pool)])  # type: ignore[misc]
                for env_id in fit.workloads
            },
            trainer=max(fit.trainer_pools, key=lambda pool: found[trainer_key(pool)]),
            devices={pool: int(np.ceil(n - 1e-6)) for pool, n in rented.items()},
            engines=self._engines(found, terms),
            used=used,
            gains=gains,
        )

    def _engines(
        self, found: Mapping[Key, float], terms: Mapping[str, Mapping[Key, float]]
    ) -> dict[str, int]:
        """Return pool -> number of engines: as many as requested, or one on each free device."""
        limited, group = self._fit.demand.num_engines is not None, self._fit.demand.engine_devices
        engines = {}
        for name, pool in self._fit.pools.items():
            others = {k: v for k, v in terms[name].items() if k[0] in "zt"}
            left = pool.count - (0.0 if self._program.crowded else _total(others, found))
            most = engine_pool(replace(pool, count=int(left + 1e-6)), group).count
            engines[name] = int(found[engines_key(name)] + 1e-6) if limited else most
        return {name: n for name, n in engines.items() if n}


def _total(coefficients: Mapping[Key, float], at: Mapping[Key, float]) -> float:
    return sum(value * at[key] for key, value in coefficients.items())


def _vector(coefficients: Mapping[Key, float], columns: Mapping[Key, int]) -> Any:
    vector = np.zeros(len(columns))
    for key, value in coefficients.items():
        vector[columns[key]] += value
    return vector


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError as e:
        raise UserError(
            "planning over several pools requires scipy: pip install 'rollart[plan]'"
        ) from e
    return optimize
