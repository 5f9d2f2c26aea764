"""The linear program of a placement, and its solution by scipy's HiGHS.

    rate      of all trajectories, what is to be large
    r[w]      trajectories/s generated in way w (env, pool, batch)
    z[e, q]   trajectories/s of env e whose environments are on pool q;  y[e, q]: 0 or 1, whether
    t[p]      0 or 1, whether the trainer is on pool p
    n[p]      engines on pool p, a device each, a whole number
    k[p]      devices of pool p in use

    generation   sum of r over the ways of e = weight[e] rate
    envs         sum of z[e, :] = weight[e] rate;  z[e, q] <= y[e, q];  sum of y[e, :] = 1
    engines      sum of r device_s <= n[p];  sum of n <= num_engines
    devices      n[p] + sum of z cpu_s + ranks t[p] <= k[p] <= count[p]
    episodes     sum of r batch device_s + rate outside_s <= max_concurrent    (Little's law)
    training     rate <= sum of t[p] ranks / training_s[p]
    rewards      rate reward_s <= calls at once of the serverless pool

Batches of several sizes on one pool are shares of its time; so a few episodes at once give small
batches, and the rate falls as it should.

Takes: a :class:`Fit`. Gives: a :class:`Solution`. Never: imports scipy before it is asked to solve.
Rates inside are in units of ``unit``, an upper bound, so that all numbers are near 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollart_core.contracts.hardware import Placement
from rollart_core.errors import UserError
from rollart_core.plan.fit import Fit, Way

Key = tuple[str, ...]
RATE: Key = ("rate",)
BUSY, CORES, DEVICES, ENGINES = "busy", "cores", "devices", "engines"
EPISODES, TRAINING, REWARDS = "episodes", "training", "rewards"
"""Labels of the rows that hold the rate down."""


@dataclass(frozen=True, slots=True)
class Row:
    """``low <= coefficients . variables <= high``; the label says what it holds down."""

    label: str
    of: str
    """Env or pool it speaks of."""
    coefficients: Mapping[Key, float]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Solution:
    """What the program found; rates in trajectories/s."""

    rate: float
    ways: Mapping[Way, float]
    env_pools: Mapping[str, str]
    trainer: str
    devices: Mapping[str, int]
    """Pool -> devices in use."""
    engines: Mapping[str, int]
    """Pool -> engines there."""
    used: Mapping[str, float]
    """Pool -> devices' worth of time in use, the trainer's counted in full."""
    gains: Mapping[str, float]
    """What holds the rate down (``devices of h100``) -> gain in rate, relative to its own gain."""


@dataclass(slots=True)
class Program:
    """Variables, rows and bounds; see the module."""

    fit: Fit
    fixed: Placement | None = None
    """Where everything is already; then only rates are open."""
    crowded: bool = False
    """Whether environments may share cores with engines and trainer: for clusters with few."""
    unit: float = 1.0
    keys: list[Key] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    bounds: dict[Key, tuple[float, float]] = field(default_factory=dict)
    whole: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unit = _upper_bound(self.fit)
        self._variables()
        self._generation()
        self._envs()
        self._devices()
        self._episodes()
        self._training()
        self._rewards()

    def solve(self) -> Solution:
        """Return the fastest solution.

        Where something else than engines holds the rate down (the trainer, say), engines still get
        the shares with which they could generate the most, so that they have room to spare.

        Raises:
            ValueError: When nothing can be generated at all.
        """
        fastest = self._maximise({RATE: 1.0})
        self._check_some(fastest)
        without = [row for row in self.rows if row.label != TRAINING]
        most = self._maximise({RATE: 1.0}, self._made(fastest), without)
        most = self._least_busy(most, without)
        share = min(1.0, fastest[RATE] / most[RATE])
        scaled = {k: v * share if k[0] in ("r", "z", "rate") else v for k, v in most.items()}
        return self._solution(scaled, self._gains(fastest))

    def best_value(self) -> Solution:
        """Return the solution with the largest rate for its price.

        By Dinkelbach's method (Management Science 13(7), 1967): the largest ``rate - q price``,
        ``q`` being the ratio of the solution before, until the ratio grows no more. Then as fast as
        the devices it takes allow, counted in whole ones.
        """
        prices = {_k(name): pool.price_per_hour for name, pool in self.fit.pools.items()}
        found = self._maximise({RATE: 1.0})
        ratio = 0.0
        while (value := found[RATE] / _total(prices, found)) > ratio * (1 + 1e-6):
            ratio = value
            earned = {RATE: 1.0 + 1e-6} | {k: -ratio * p for k, p in prices.items()}
            found = self._maximise(earned)
        for name, pool in self.fit.pools.items():
            whole = min(float(pool.count), np.ceil(found[_k(name)] - 1e-6))
            self.bounds[_k(name)] = (0.0, whole)
        return self._cheapest(self._maximise({RATE: 1.0}))

    def _least_busy(self, most: dict[Key, float], rows: Sequence[Row]) -> dict[Key, float]:
        """Return the solution as fast as ``most`` in which devices have the least to do."""
        busy = {
            key: -value / self.fit.pools[row.of].count
            for row in rows
            if row.label == BUSY
            for key, value in row.coefficients.items()
            if key[0] == "r"
        }
        at = {key: (float(round(most[key])),) * 2 for key in self.whole}
        at[RATE] = (most[RATE] * (1 - 1e-6), 1.0)
        result = self._linear(busy, at, rows)
        return most if result.x is None else self._named(result.x)

    def _cheapest(self, fastest: Mapping[Key, float]) -> Solution:
        """Return the cheapest solution that is as fast as ``fastest``, choices as there."""
        self._check_some(fastest)
        gains = self._gains(fastest)
        at = self._made(fastest) | {RATE: (fastest[RATE] * (1 - 1e-7), 1.0)}
        result = self._linear({key: -cost for key, cost in self._costs().items()}, at, self.rows)
        return self._solution(fastest if result.x is None else self._named(result.x), gains)

    def _check_some(self, found: Mapping[Key, float]) -> None:
        if found[RATE] < 1e-9:
            raise ValueError(
                "no device is left to generate with once the trainer has "
                f"{self.fit.demand.num_trainer_ranks}: add devices, or lower "
                "runtime.num_trainer_ranks"
            )

    def _named(self, x: Iterable[float]) -> dict[Key, float]:
        return dict(zip(self.keys, map(float, x), strict=True))

    def _made(self, found: Mapping[Key, float]) -> dict[Key, tuple[float, float]]:
        """Return the choices of a solution, of pools for envs and trainer, as bounds."""
        chosen = [key for key in self.whole if key[0] != "n"]
        return {key: (float(round(found[key])),) * 2 for key in chosen}

    # Variables and rows

    def _variables(self) -> None:
        fit = self.fit
        self._add(RATE, 0.0, 1.0)
        for way in fit.ways:
            self._add(_way_key(way), 0.0, np.inf)
        for env_id in fit.workloads:
            for pool in fit.env_pools:
                fixed = self.fixed.envs[env_id] if self.fixed else _only(fit.env_pools)
                self._add(_z(env_id, pool), 0.0, 1.0)
                self._add(_y(env_id, pool), *_chosen(fixed, pool), whole=True)
        trainer = self.fixed.trainer if self.fixed else _only(fit.trainer_pools)
        for pool in fit.trainer_pools:
            self._add(_t(pool), *_chosen(trainer, pool), whole=True)
        for name, found in fit.pools.items():
            # Whole only where engines are few: else there is one on every device that is left.
            limited = fit.demand.num_engines is not None
            self._add(_n(name), 0.0, float(found.count), whole=limited)
            self._add(_k(name), 0.0, float(found.count))

    def _generation(self) -> None:
        for env_id, weight in self.fit.weights.items():
            ways = [w for w in self.fit.ways if w.env_id == env_id]
            total = {_way_key(w): 1.0 for w in ways}
            self._row("generation", env_id, {**total, RATE: -weight}, 0.0, 0.0)
            if self.fixed is None:
                continue
            for pool in self.fit.pools:
                share = self.fixed.engines[env_id].get(pool, 0.0)
                there = {_way_key(w): 1.0 for w in ways if w.pool == pool}
                if share and not there:
                    raise ValueError(f"the model does not fit the devices of {pool}")
                self._row("fixed", env_id, {**there, RATE: -weight * share}, 0.0, 0.0)

    def _envs(self) -> None:
        for env_id, weight in self.fit.weights.items():
            pools = self.fit.env_pools
            total = {_z(env_id, pool): 1.0 for pool in pools}
            self._row("envs", env_id, {**total, RATE: -weight}, 0.0, 0.0)
            self._row("one pool", env_id, {_y(env_id, pool): 1.0 for pool in pools}, 1.0, 1.0)
            for pool in pools:
                link = {_z(env_id, pool): 1.0, _y(env_id, pool): -1.0}
                self._row("where envs are", env_id, link, -np.inf, 0.0)

    def _devices(self) -> None:
        fit = self.fit
        for name in fit.pools:
            busy = {_way_key(w): w.device_s * self.unit for w in fit.ways if w.pool == name}
            used = {_n(name): 1.0, _k(name): -1.0}
            if name in fit.env_pools:
                cores = {_z(e, name): fit.cpu_s(e, name) * self.unit for e in fit.workloads}
                if self.crowded:
                    self._row(CORES, name, {**cores, _k(name): -1.0}, -np.inf, 0.0)
                else:
                    used |= cores
            if self._takes_turns(name):
                busy[RATE] = fit.training_s(name) * self.unit
            elif name in fit.trainer_pools:
                used[_t(name)] = float(fit.demand.num_trainer_ranks)
            self._row(BUSY, name, {**busy, _n(name): -1.0}, -np.inf, 0.0)
            self._row(DEVICES, name, used, -np.inf, 0.0)
        if (most := fit.demand.num_engines) is not None:
            self._row(ENGINES, "", {_n(name): 1.0 for name in fit.pools}, -np.inf, float(most))

    def _episodes(self) -> None:
        inside = {_way_key(w): w.resident_s * self.unit for w in self.fit.ways}
        outside = {RATE: self.fit.outside_s() * self.unit}
        most = float(self.fit.demand.max_concurrent)
        self._row(EPISODES, "", {**inside, **outside}, -np.inf, most)

    def _training(self) -> None:
        fit, ranks = self.fit, self.fit.demand.num_trainer_ranks
        pools = fit.trainer_pools
        self._row("one trainer", "", {_t(pool): 1.0 for pool in pools}, 1.0, 1.0)
        able = {_t(p): -ranks / fit.training_s(p) / self.unit for p in pools}
        self._row(TRAINING, "", {RATE: 1.0, **able}, -np.inf, 0.0)

    def _rewards(self) -> None:
        pool = self.fit.reward_pool
        if pool is not None:
            workloads, weights = self.fit.workloads, self.fit.weights
            calls = sum(share * workloads[e].reward_s for e, share in weights.items())
            used = {RATE: calls * self.unit, _k(pool): -1.0}
            self._row(REWARDS, pool, used, -np.inf, 0.0)

    def _takes_turns(self, pool: str) -> bool:
        """True when somebody put trainer and engines on the same few devices."""
        placed, ranks = self.fixed, self.fit.demand.num_trainer_ranks
        return placed is not None and placed.trainer == pool and self.fit.pools[pool].count <= ranks

    def _costs(self) -> dict[Key, float]:
        """Return the price of a device of each pool, and next to nothing for its mere use."""
        pools = self.fit.pools
        least = 1e-3 * max([1e-3, *(pool.price_per_hour for pool in pools.values())])
        return {
            _k(name): pool.price_per_hour + least * (1 + rank / 100)
            for rank, (name, pool) in enumerate(pools.items())
        }

    def _add(self, key: Key, low: float, high: float, *, whole: bool = False) -> None:
        self.keys.append(key)
        self.bounds[key] = (low, high)
        if whole:
            self.whole.add(key)

    def _row(
        self, label: str, of: str, coefficients: Mapping[Key, float], low: float, high: float
    ) -> None:
        self.rows.append(Row(label, of, coefficients, low, high))

    # Solving

    def _maximise(
        self,
        objective: Mapping[Key, float],
        at: Mapping[Key, tuple[float, float]] | None = None,
        rows: Sequence[Row] | None = None,
    ) -> dict[Key, float]:
        """Maximise; some variables may be bounded otherwise, some rows left out."""
        rows, bounds = rows or self.rows, {**self.bounds, **(at or {})}
        columns = {key: i for i, key in enumerate(self.keys)}
        low, high = zip(*(bounds[key] for key in self.keys), strict=True)
        optimize = _scipy()
        if all(bounds[key][0] == bounds[key][1] for key in self.whole):
            linear = self._linear(objective, bounds, rows)
            return self._found(linear)
        result = optimize.milp(
            c=-_vector(objective, columns),
            constraints=optimize.LinearConstraint(
                np.array([_vector(row.coefficients, columns) for row in rows]),
                [row.low for row in rows],
                [row.high for row in rows],
            ),
            bounds=optimize.Bounds(low, high),
            integrality=np.array([key in self.whole for key in self.keys], dtype=int),
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
        at: Mapping[Key, tuple[float, float]],
        rows: Sequence[Row],
    ) -> Any:
        """Maximise with some variables bounded otherwise, all choices among them."""
        columns = {key: i for i, key in enumerate(self.keys)}
        limits = [row for row in rows if row.low == -np.inf]
        exact = [row for row in rows if row.low == row.high]
        return _scipy().linprog(
            -_vector(objective, columns),
            A_ub=np.array([_vector(row.coefficients, columns) for row in limits]),
            b_ub=[row.high for row in limits],
            A_eq=np.array([_vector(row.coefficients, columns) for row in exact]),
            b_eq=[row.low for row in exact],
            bounds=[at.get(key, self.bounds[key]) for key in self.keys],
        )

    def _gains(self, found: Mapping[Key, float]) -> dict[str, float]:
        """Return by what share of its own growth each limit would raise the rate.

        From the marginals of the linear program that is left once the choices are made, with all
        devices of each pool that may be had.
        """
        all_of = {_k(name): (self.bounds[_k(name)][1],) * 2 for name in self.fit.pools}
        # A pool with nothing but the trainer holds nothing down by its devices.
        idle = {name for name in self.fit.pools if not self._works(name, found)}
        rows = [row for row in self.rows if row.label != DEVICES or row.of not in idle]
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
        kept = {k for k in self.keys if k[0] == "z" and k[-1] == pool}
        return found[_n(pool)] > 0.5 or any(found[key] > 1e-9 for key in kept)

    def _solution(self, found: Mapping[Key, float], gains: Mapping[str, float]) -> Solution:
        fit = self.fit
        rates = {way: max(0.0, found[_way_key(way)]) for way in fit.ways}
        terms: dict[str, dict[Key, float]] = {name: {} for name in fit.pools}
        for row in self.rows:
            if row.label in (BUSY, CORES, DEVICES):
                terms[row.of] |= {k: v for k, v in row.coefficients.items() if k[0] not in "nk"}
        used = {name: _total(coefficients, found) for name, coefficients in terms.items()}
        rented = {
            name: found[_n(name)]
            + _total({k: v for k, v in terms[name].items() if k[0] in "zt"}, found)
            for name in fit.pools
        }
        return Solution(
            rate=found[RATE] * self.unit,
            ways={way: rate * self.unit for way, rate in rates.items() if rate > 1e-9},
            env_pools={
                env_id: max(fit.env_pools, key=lambda pool, e=env_id: found[_y(e, pool)])  # type: ignore[misc]
                for env_id in fit.workloads
            },
            trainer=max(fit.trainer_pools, key=lambda pool: found[_t(pool)]),
            devices={pool: int(np.ceil(n - 1e-6)) for pool, n in rented.items()},
            engines={pool: n for pool in fit.pools if (n := int(found[_n(pool)] + 1e-6))},
            used=used,
            gains=gains,
        )


def _total(coefficients: Mapping[Key, float], at: Mapping[Key, float]) -> float:
    return sum(value * at[key] for key, value in coefficients.items())


def _upper_bound(fit: Fit) -> float:
    """Return a rate that no placement can reach, though not far above what one can.

    Every device in the way that suits it best; and all episodes at once at their shortest.
    """
    pools = {way.pool for way in fit.ways}
    device_s, alone_s = 0.0, fit.outside_s()
    for env_id, share in fit.weights.items():
        ways = [way for way in fit.ways if way.env_id == env_id]
        device_s += share * min((way.device_s for way in ways), default=0.0)
        alone_s += share * min((way.resident_s for way in ways), default=0.0)
    count = sum(fit.pools[name].count for name in pools)
    bounds = [1e9, count / max(device_s, 1e-9), fit.demand.max_concurrent / max(alone_s, 1e-9)]
    return 1.01 * min(bounds)


def _z(env_id: str, pool: str) -> Key:
    return ("z", env_id, pool)


def _y(env_id: str, pool: str) -> Key:
    return ("y", env_id, pool)


def _t(pool: str) -> Key:
    return ("t", pool)


def _n(pool: str) -> Key:
    return ("n", pool)


def _k(pool: str) -> Key:
    return ("k", pool)


def _way_key(way: Way) -> Key:
    return ("r", way.env_id, way.pool, str(way.batch))


def _chosen(fixed: str | None, pool: str) -> tuple[float, float]:
    """Return the bounds of a choice that is open, made, or made otherwise."""
    if fixed is None:
        return 0.0, 1.0
    return (1.0, 1.0) if fixed == pool else (0.0, 0.0)


def _only(names: Sequence[str]) -> str | None:
    """Return the one name there is to choose, if there is but one."""
    return names[0] if len(names) == 1 else None


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
            "planning over several pools needs scipy: pip install 'rollart[plan]'"
        ) from e
    return optimize
