"""The linear program of a placement: its variables, and the rows that hold them.

    rate      of all trajectories, what is to be large
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
    rewards      rate reward_s <= calls at once of the serverless pool

Batches of several sizes on one pool are shares of its time; so a few episodes at once give small
batches, and the rate falls as it should.

Takes: a :class:`Fit`. Gives: a :class:`Program`. Never: solves it
(:mod:`rollart_planner.optimum` does). Rates inside are in units of ``unit``, an upper bound, so
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
"""Labels of the rows that hold the rate down."""


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """``low <= coefficients . variables <= high``; the label says what it holds down."""

    label: str
    of: str
    """Env or pool it speaks of."""
    coefficients: Mapping[Key, float]
    low: float
    high: float


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
            # Whole only where engines are few: else there is one on every device that is left.
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
        """True when somebody put trainer and engines on the same few devices."""
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
    """Return a rate that no placement can reach, though not far above what one can.

    Every device in the way that suits it best; and all episodes at once at their shortest.
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
    """Trajectories/s of an env whose environments are there."""
    return ("z", env_id, pool)


def choice_key(env_id: str, pool: str) -> Key:
    """Whether they are there."""
    return ("y", env_id, pool)


def trainer_key(pool: str) -> Key:
    """Whether the trainer is there."""
    return ("t", pool)


def engines_key(pool: str) -> Key:
    """Engines there."""
    return ("n", pool)


def devices_key(pool: str) -> Key:
    """Devices in use there."""
    return ("k", pool)


def way_key(way: FitMethod) -> Key:
    """Trajectories/s generated in that way."""
    return ("r", way.env_id, way.pool, str(way.batch))


def _chosen(fixed: str | None, pool: str) -> tuple[float, float]:
    """Return the bounds of a choice that is open, made, or made otherwise."""
    if fixed is None:
        return 0.0, 1.0
    return (1.0, 1.0) if fixed == pool else (0.0, 0.0)


def _only(names: Sequence[str]) -> str | None:
    """Return the one name there is to choose, if there is but one."""
    return names[0] if len(names) == 1 else None
