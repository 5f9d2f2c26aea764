"""The linear program of a placement: its variables and constraints.

    rate      of all trajectories, to be maximised
    r[w]      trajectories/s generated in way w (env, pool, batch)
    z[e, q]   trajectories/s of env e whose environments are on pool q;  y[e, q]: 0 or 1, whether
    t[p]      0 or 1, whether the trainer is on pool p
    n[p]      engines on pool p, each over g devices, a whole number
    k[p]      devices of pool p in use

    generation   sum of r over the ways of e = weight[e] rate
    envs         sum of z[e, :] = weight[e] rate;  z[e, q] <= y[e, q];  sum of y[e, :] = 1
    engines      sum of r engine_s <= n[p];  sum of n <= num_engines
    devices      g n[p] + sum of z cpu_s + ranks t[p] <= k[p] <= count[p]
    episodes     sum of r batch engine_s + rate outside_s <= max_concurrent    (Little's law)
    training     rate <= sum of t[p] ranks / training_s[p]
    rewards      rate reward_s <= concurrent calls of the serverless pool

Batches of several sizes on one pool share its time. So a low concurrency gives small batches and a
lower rate, as it should.

Takes: a :class:`Fit`. Gives: a :class:`Program`. Never: solves it
(:mod:`rollart_planner.optimum` does). Internal rates are in units of ``unit``, an upper bound, so
that all numbers are near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollart_core.contracts.hardware import Placement
from rollart_planner.fit import Fit, FitMethod
from rollart_planner.roofline import engine_pool

Key = tuple[str, ...]
RATE: Key = ("rate",)
BUSY, CORES, DEVICES, ENGINES = "busy", "cores", "devices", "engines"
EPISODES, TRAINING, REWARDS = "episodes", "training", "rewards"
"""Labels of the rows that limit the rate."""


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """``low <= coefficients . variables <= high``. The label names the limit."""

    label: str
    of: str
    """The env or pool that it applies to."""
    coefficients: Mapping[Key, float]
    low: float
    high: float


@dataclass(slots=True)
class Program:
    """Variables, rows and bounds; see the module docstring."""

    fit: Fit
    fixed: Placement | None = None
    """A placement whose choices are fixed; then only the rates are free."""
    crowded: bool = False
    """Whether environments may share cores with engines and trainer, if there are few cores."""
    unit: float = 1.0
    keys: list[Key] = field(default_factory=list)
    rows: list[ProgramRow] = field(default_factory=list)
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

    def _variables(self) -> None:
        fit = self.fit
        self._add(RATE, 0.0, 1.0)
        for way in fit.ways:
            self._add(way_key(way), 0.0, np.inf)
        for env_id in fit.workloads:
            for pool in fit.env_pools:
                fixed = self.fixed.envs[env_id] if self.fixed else _only(fit.env_pools)
                self._add(env_key(env_id, pool), 0.0, 1.0)
                self._add(choice_key(env_id, pool), *_chosen(fixed, pool), whole=True)
        trainer = self.fixed.trainer if self.fixed else _only(fit.trainer_pools)
        for pool in fit.trainer_pools:
            self._add(trainer_key(pool), *_chosen(trainer, pool), whole=True)
        for name, found in fit.pools.items():
            # Integral only if the number of engines is limited: else each free device has one.
            limited = fit.demand.num_engines is not None
            most = engine_pool(found, fit.demand.engine_devices).count
            self._add(engines_key(name), 0.0, float(most), whole=limited)
            self._add(devices_key(name), 0.0, float(found.count))

    def _generation(self) -> None:
        for env_id, weight in self.fit.weights.items():
            ways = [w for w in self.fit.ways if w.env_id == env_id]
            total = {way_key(w): 1.0 for w in ways}
            self._row("generation", env_id, {**total, RATE: -weight}, 0.0, 0.0)
            if self.fixed is None:
                continue
            for pool in self.fit.pools:
                share = self.fixed.engines[env_id].get(pool, 0.0)
                there = {way_key(w): 1.0 for w in ways if w.pool == pool}
                if share and not there:
                    raise ValueError(f"the model does not fit the devices of {pool}")
                self._row("fixed", env_id, {**there, RATE: -weight * share}, 0.0, 0.0)

    def _envs(self) -> None:
        for env_id, weight in self.fit.weights.items():
            pools = self.fit.env_pools
            total = {env_key(env_id, pool): 1.0 for pool in pools}
            self._row("envs", env_id, {**total, RATE: -weight}, 0.0, 0.0)
            self._row(
                "one pool", env_id, {choice_key(env_id, pool): 1.0 for pool in pools}, 1.0, 1.0
            )
            for pool in pools:
                link = {env_key(env_id, pool): 1.0, choice_key(env_id, pool): -1.0}
                self._row("where envs are", env_id, link, -np.inf, 0.0)

    def _devices(self) -> None:
        fit = self.fit
        for name in fit.pools:
            busy = {way_key(w): w.engine_s * self.unit for w in fit.ways if w.pool == name}
            group = float(fit.demand.engine_devices)
            used = {engines_key(name): group, devices_key(name): -1.0}
            if name in fit.env_pools:
                cores = {env_key(e, name): fit.cpu_s(e, name) * self.unit for e in fit.workloads}
                if self.crowded:
                    self._row(CORES, name, {**cores, devices_key(name): -1.0}, -np.inf, 0.0)
                else:
                    used |= cores
            if self._takes_turns(name):
                if not fit.demand.colocates:  # else batches alternate: see `batch_rate`
                    busy[RATE] = fit.training_s(name) / group * self.unit
            elif name in fit.trainer_pools:
                used[trainer_key(name)] = float(fit.demand.num_trainer_ranks)
            self._row(BUSY, name, {**busy, engines_key(name): -1.0}, -np.inf, 0.0)
            self._row(DEVICES, name, used, -np.inf, 0.0)
        if (most := fit.demand.num_engines) is not None:
            self._row(
                ENGINES, "", {engines_key(name): 1.0 for name in fit.pools}, -np.inf, float(most)
            )

    def _episodes(self) -> None:
        inside = {way_key(w): w.resident_s * self.unit for w in self.fit.ways}
        outside = {RATE: self.fit.outside_s() * self.unit}
        most = float(self.fit.demand.max_concurrent)
        self._row(EPISODES, "", {**inside, **outside}, -np.inf, most)

    def _training(self) -> None:
        fit, ranks = self.fit, self.fit.demand.num_trainer_ranks
        pools = fit.trainer_pools
        self._row("one trainer", "", {trainer_key(pool): 1.0 for pool in pools}, 1.0, 1.0)
        able = {trainer_key(p): -ranks / fit.training_s(p) / self.unit for p in pools}
        self._row(TRAINING, "", {RATE: 1.0, **able}, -np.inf, 0.0)

    def _rewards(self) -> None:
        pool = self.fit.reward_pool
        if pool is not None:
            workloads, weights = self.fit.workloads, self.fit.weights
            calls = sum(share * workloads[e].reward_s for e, share in weights.items())
            used = {RATE: calls * self.unit, devices_key(pool): -1.0}
            self._row(REWARDS, pool, used, -np.inf, 0.0)

    def _takes_turns(self, pool: str) -> bool:
        """Whether trainer and engines use the devices of a pool in turns.

        They do if the run says so, or if a fixed placement has both on the same few devices.
        """
        if self.fit.demand.colocates:
            trainer = self.fixed.trainer if self.fixed else self.fit.trainer_pools[0]
            return trainer == pool
        placed, ranks = self.fixed, self.fit.demand.num_trainer_ranks
        return placed is not None and placed.trainer == pool and self.fit.pools[pool].count <= ranks

    def _add(self, key: Key, low: float, high: float, *, whole: bool = False) -> None:
        self.keys.append(key)
        self.bounds[key] = (low, high)
        if whole:
            self.whole.add(key)

    def _row(
        self, label: str, of: str, coefficients: Mapping[Key, float], low: float, high: float
    ) -> None:
        self.rows.append(ProgramRow(label, of, coefficients, low, high))


def _upper_bound(fit: Fit) -> float:
    """Return an upper bound of the rate, which is not far above the best placement.

    It assumes that every device runs in its best way, and all episodes take their shortest time.
    """
    pools = {way.pool for way in fit.ways}
    engine_s, alone_s = 0.0, fit.outside_s()
    for env_id, share in fit.weights.items():
        ways = [way for way in fit.ways if way.env_id == env_id]
        engine_s += share * min((way.engine_s for way in ways), default=0.0)
        alone_s += share * min((way.resident_s for way in ways), default=0.0)
    count = sum(engine_pool(fit.pools[name], fit.demand.engine_devices).count for name in pools)
    bounds = [1e9, count / max(engine_s, 1e-9), fit.demand.max_concurrent / max(alone_s, 1e-9)]
    return 1.01 * min(bounds)


def env_key(env_id: str, pool: str) -> Key:
    """Name the trajectories/s of an env whose environments are on a pool."""
    return ("z", env_id, pool)


def choice_key(env_id: str, pool: str) -> Key:
    """Name the choice of a pool for an env's environments."""
    return ("y", env_id, pool)


def trainer_key(pool: str) -> Key:
    """Name the choice of a pool for the trainer."""
    return ("t", pool)


def engines_key(pool: str) -> Key:
    """Name the number of engines on a pool."""
    return ("n", pool)


def devices_key(pool: str) -> Key:
    """Name the devices in use on a pool."""
    return ("k", pool)


def way_key(way: FitMethod) -> Key:
    """Name the trajectories/s generated in a way."""
    return ("r", way.env_id, way.pool, str(way.batch))


def _chosen(fixed: str | None, pool: str) -> tuple[float, float]:
    """Return the bounds of a choice: free, chosen, or not chosen."""
    if fixed is None:
        return 0.0, 1.0
    return (1.0, 1.0) if fixed == pool else (0.0, 0.0)


def _only(names: Sequence[str]) -> str | None:
    """Return the only name if there is exactly one."""
    return names[0] if len(names) == 1 else None
