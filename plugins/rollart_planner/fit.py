"""Determine which pools can hold envs, engines, the trainer and rewards, and how fast they are.

Takes: workloads, pools, a demand. Gives: :class:`Fit`, or a ValueError that names what is missing.
Never: chooses a placement; :mod:`rollart_planner.solve` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, ModelShape, Pool, Role
from rollart_planner.cluster import filled
from rollart_planner.devices import CPU, SERVERLESS
from rollart_planner.roofline import (
    TurnTime,
    engine_model,
    engine_pool,
    max_batch,
    training_bytes,
    training_fits,
    training_s,
    turn_time,
)

NOMINAL = ModelShape(1_540_000_000, 28, 12, 2, 128)
"""The assumed shape of an unknown model: 1.5 billion parameters in bfloat16."""


@dataclass(frozen=True, slots=True)
class FitMethod:
    """One way to generate an environment's trajectories: a pool and a batch size."""

    env_id: str
    pool: str
    batch: int
    turn: TurnTime
    engine_s: float
    """Engine seconds per trajectory."""

    @property
    def resident_s(self) -> float:
        """Return how long a trajectory is in an engine that always holds ``batch`` of them.

        By Little's law: ``batch`` are in the engine, and ``1 / engine_s`` leave it per second.
        """
        return self.batch * self.engine_s


@dataclass(frozen=True, slots=True)
class Fit:
    """All options to choose from. Pools and envs are sorted by name."""

    workloads: Mapping[str, Workload]
    weights: Mapping[str, float]
    """Env id -> share of the trajectories. The shares sum to 1."""
    pools: Mapping[str, Pool]
    demand: Demand
    model: ModelShape
    ways: tuple[FitMethod, ...]
    env_pools: tuple[str, ...]
    trainer_pools: tuple[str, ...]
    reward_pool: str | None
    """If None, rewards run on the env workers."""

    def cpu_s(self, env_id: str, pool: str) -> float:
        """Return the core seconds of a trajectory outside the engine, on pools of CPU cores."""
        if not is_cpu(self.pools[pool]):
            return 0.0
        workload = self.workloads[env_id]
        return workload.turns * workload.env_s + (0 if self.reward_pool else workload.reward_s)

    def outside_s(self) -> float:
        """Return the mean seconds of a trajectory outside the engine, over the mix."""
        return sum(
            share * (self.workloads[e].turns * self.workloads[e].env_s + self.workloads[e].reward_s)
            for e, share in self.weights.items()
        )

    def training_s(self, pool: str) -> float:
        """Return the mean device seconds of training on a trajectory, over the mix."""
        return sum(
            share
            * training_s(
                self.model,
                self.pools[pool],
                self.workloads[e],
                recomputes=self.demand.recomputes,
                num_references=self.demand.num_references,
            )
            for e, share in self.weights.items()
        )


def fit(workloads: Mapping[str, Workload], pools: Sequence[Pool], demand: Demand) -> Fit:
    """Determine what can run on which pool.

    Raises:
        ValueError: If something fits no pool. The message names it and how to fix it.
    """
    usable, model = _considered(pools, demand)
    engines = _engine_pools(usable)
    _check_engines(model, engines, demand)
    ways = _all_ways(model, engines, workloads, demand)
    found = Fit(
        workloads={e: workloads[e] for e in sorted(workloads)},
        weights=normalised(workloads, demand.weights),
        pools={pool.name: pool for pool in usable},
        demand=demand,
        model=model,
        ways=tuple(ways),
        env_pools=tuple(p.name for p in _env_pools(usable)),
        trainer_pools=tuple(p.name for p in _trainer_pools(usable, model, demand)),
        reward_pool=_reward_pool(usable, demand),
    )
    _check_ways(found, engines)
    return found


def everywhere(workloads: Mapping[str, Workload], pools: Sequence[Pool], demand: Demand) -> Fit:
    """Determine the speed of everything on every pool, including unsuitable ones.

    Raises:
        ValueError: If there is no pool, or a pool's device is unknown.
    """
    usable, model = _considered(pools, demand)
    names = tuple(pool.name for pool in usable)
    computing = [pool for pool in usable if not is_serverless(pool)]
    _check_engines(model, computing, demand)
    ways = _all_ways(model, computing, workloads, demand)
    return Fit(
        workloads={e: workloads[e] for e in sorted(workloads)},
        weights=normalised(workloads, demand.weights),
        pools={pool.name: pool for pool in usable},
        demand=demand,
        model=model,
        ways=tuple(ways),
        env_pools=names,
        trainer_pools=tuple(pool.name for pool in computing),
        reward_pool=_reward_pool(usable, demand),
    )


def usable_pools(pools: Sequence[Pool]) -> list[Pool]:
    """Return the pools that have a device.

    Raises:
        ValueError: If there is none.
    """
    usable = [pool for pool in pools if pool.count > 0]
    if not usable:
        given = ", ".join(f"{p.name} (count {p.count})" for p in pools) or "no pools at all"
        raise ValueError(
            f"a placement needs a pool with at least one device, but the pools are: {given}; "
            "add one to the cluster file, or set its count to 1 or more"
        )
    return usable


def computing_pools(pools: Sequence[Pool]) -> list[Pool]:
    """Return the pools that have a device and may run more than rewards.

    Raises:
        ValueError: If there is none.
    """
    usable = usable_pools(pools)
    computing = [pool for pool in usable if not is_serverless(pool)]
    if not computing:
        raise ValueError(
            f"serverless pools run only rewards, and there is no other ({_names(usable)}); add "
            "a pool of accelerators or CPU cores for environments, engines and trainer"
        )
    return computing


def normalised(
    workloads: Mapping[str, Workload], weights: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the share of each env. An env without a weight has weight 1 before normalisation.

    Raises:
        ValueError: If a weight is not above 0, or belongs to an env that does not exist.
    """
    for env_id, weight in weights.items():
        if env_id not in workloads:
            raise ValueError(f"there is a weight for {env_id}, but no workload")
        if not weight > 0:
            raise ValueError(f"the weight of {env_id} is {weight:g}; it must be above 0")
    total = sum(weights.get(env_id, 1.0) for env_id in workloads)
    return {env_id: weights.get(env_id, 1.0) / total for env_id in sorted(workloads)}


def is_cpu(pool: Pool) -> bool:
    """Return whether its devices are CPU cores."""
    return pool.device.lower() == CPU


def is_serverless(pool: Pool) -> bool:
    """Return whether it runs only functions."""
    return pool.device.lower() == SERVERLESS


def may(pool: Pool, role: Role) -> bool:
    """Return whether a pool has a role. By default, serverless pools only run rewards."""
    return role in pool.roles if pool.roles else not is_serverless(pool)


def _engine_pools(pools: Sequence[Pool]) -> list[Pool]:
    """Return accelerators, and CPU pools with that role; all CPU pools if there is nothing else."""
    able = [pool for pool in pools if may(pool, "engines") and not is_serverless(pool)]
    if not able:
        raise ValueError(
            f"no pool may run inference engines ({_names(pools)}); "
            "add a pool of accelerators, or engines to the roles of one"
        )
    chosen = [pool for pool in able if not is_cpu(pool) or "engines" in pool.roles]
    return chosen or able


def _considered(pools: Sequence[Pool], demand: Demand) -> tuple[list[Pool], ModelShape]:
    """Return the pools by name, and the model. Ignore pools' memory if the model is unknown."""
    usable = sorted(filled(usable_pools(pools)), key=lambda pool: pool.name)
    if demand.model is None:
        return [replace(pool, memory_bytes=0) for pool in usable], NOMINAL
    return usable, demand.model


def _env_pools(pools: Sequence[Pool]) -> list[Pool]:
    able = [p for p in pools if may(p, "envs") and (is_cpu(p) or "envs" in p.roles)]
    if not able:
        raise ValueError(
            f"no pool may run environments ({_names(pools)}); add the cores of your machines "
            "as a pool with device: cpu, or envs to the roles of one"
        )
    return able


def _trainer_pools(pools: Sequence[Pool], model: ModelShape, demand: Demand) -> list[Pool]:
    num_ranks = demand.num_trainer_ranks
    able = [pool for pool in pools if may(pool, "trainer") and not is_serverless(pool)]
    if not able:
        raise ValueError(
            f"no pool may run the trainer ({_names(pools)}); add trainer to the roles of one"
        )
    able = [p for p in able if not is_cpu(p) or "trainer" in p.roles] or able
    enough = [pool for pool in able if pool.count >= num_ranks]
    if not enough:
        have = ", ".join(f"{pool.name} has {pool.count}" for pool in able)
        raise ValueError(
            f"the trainer needs {num_ranks} devices of one pool, but {have}; "
            "lower runtime.num_trainer_ranks, or add devices"
        )
    trained = demand.num_trained_params
    if fitting := [pool for pool in enough if training_fits(model, pool, num_ranks, trained)]:
        return fitting
    most = max(pool.memory_bytes for pool in enough)
    needed = training_bytes(model, trained)
    raise ValueError(
        f"training {model.num_params:,} parameters needs {needed / 1e9:,.1f} GB, but {num_ranks} "
        f"rank(s) have at most {most / 1e9:g} GB: set runtime.num_trainer_ranks to "
        f"{math.ceil(needed / most)} or more"
    )


def _reward_pool(pools: Sequence[Pool], demand: Demand) -> str | None:
    able = [p for p in pools if "rewards" in p.roles or (is_serverless(p) and not p.roles)]
    return able[0].name if able and demand.stateless_rewards else None


def _all_ways(
    model: ModelShape, pools: Sequence[Pool], workloads: Mapping[str, Workload], demand: Demand
) -> list[FitMethod]:
    model = engine_model(model, demand.engine_devices)
    grouped = [engine_pool(pool, demand.engine_devices) for pool in pools]
    able = [pool for pool in grouped if pool.count]
    return [w for e in sorted(workloads) for p in able for w in _ways(model, p, e, workloads[e])]


def _ways(model: ModelShape, pool: Pool, env_id: str, workload: Workload) -> Iterable[FitMethod]:
    most = max_batch(model, pool, workload)
    sizes = {2**n for n in range(most.bit_length())} | {most}
    for batch in sorted(sizes - {0}):
        turn = turn_time(model, pool, workload, batch)
        yield FitMethod(env_id, pool.name, batch, turn, workload.turns * turn.total_s)


def _check_engines(model: ModelShape, pools: Sequence[Pool], demand: Demand) -> None:
    """Reject engines with more devices than a machine has, or that do not divide the heads."""
    num = demand.engine_devices
    if num > 1 and model.num_heads % num:
        raise ValueError(
            f"an engine over {num} devices cannot split {model.num_heads} heads evenly: use a "
            "number that divides them"
        )
    if not any(engine_pool(pool, num).count for pool in pools):
        have = ", ".join(f"{p.name} has {min(p.count, p.per_node or p.count)}" for p in pools)
        raise ValueError(
            f"an engine needs {num} devices of one machine, but {have}: use fewer devices per "
            "engine, or add devices"
        )


def _check_ways(found: Fit, engines: Sequence[Pool]) -> None:
    """Reject an env if one of its rows and the model fit no device."""
    able = {way.env_id for way in found.ways}
    for env_id in found.workloads:
        if env_id not in able:
            most = max(engines, key=lambda pool: pool.memory_bytes)
            num = found.demand.engine_devices
            where = "device" if num == 1 else f"{num} devices"
            raise ValueError(
                f"the model ({found.model.weight_bytes / 1e9:.1f} GB of weights) and one row of "
                f"{env_id} fit no {where} that may run engines; the largest is in {most.name}, "
                f"{most.memory_bytes / 1e9:g} GB: add a pool of larger devices, use more devices "
                "per engine, or use a smaller model"
            )


def _names(pools: Sequence[Pool]) -> str:
    return ", ".join(f"{pool.name}: {pool.device}" for pool in pools)
