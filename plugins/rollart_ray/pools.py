"""Pools of a Ray cluster, and the slots of a run's workers on them.

    nodes of the cluster ──> pools (declared or detected) ──> mapper ──> placement ──> slots
                                                                                          │
                                                       a placement group, one bundle a slot

Takes: Ray's node records, a placement, the number of workers per role. Gives: pools and slots, or a
ConfigError that names what is missing and where. Never: imports ray or reserves anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.config.runtime import RayPool
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.errors import ConfigError, did_you_mean

ACCELERATOR = "accelerator_type:"
_NO_CLASSES: Mapping[str, int] = {}
_A_TOUCH = 0.001
"""The amount that one worker takes of a resource that only marks a kind of node."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of the cluster that is up."""

    node_id: str
    address: str
    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    port: int = 0
    """Of its raylet; 0 if unknown."""

    @property
    def title(self) -> str:
        """Its name in errors."""
        return f"{self.name} ({self.address}, {self.node_id[:8]})"


@dataclass(frozen=True, slots=True)
class ResourceSlot:
    """The slot of one worker."""

    role: str
    pool: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def nodes_of(said: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes that are up, from the result of ``ray.nodes()``."""
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            resources=node["Resources"],
            labels=node.get("Labels") or {},
            port=int(node.get("NodeManagerPort") or 0),
        )
        for node in said
        if node["Alive"]
    ]


def found_out(nodes: Sequence[Node]) -> list[RayPool]:
    """Return the pools of a cluster: accelerators by kind, nodes with a mark, all other cores.

    A mark is a custom resource on nodes without accelerators. The result does not depend on the
    start order of the nodes.
    """
    kinds = sorted({_accelerator(n) for n in nodes if n.resources.get("GPU")})
    pools = []
    for kind in kinds:
        count = int(sum(n.resources["GPU"] for n in nodes if _accelerator(n) == kind))
        resources = {"GPU": 1.0} | ({ACCELERATOR + kind: _A_TOUCH} if kind else {})
        name = kind or "gpu"
        pools.append(RayPool(name=name, device=name, count=count, resources=resources))
    plain = [n for n in nodes if not n.resources.get("GPU")]
    for mark in sorted({key for n in plain for key in _marks(n)}):
        count = int(sum(n.resources.get(mark, 0) for n in plain))
        if count:
            pools.append(RayPool(name=mark, count=count, resources={mark: 1.0}))
    unmarked = [n for n in plain if not _marks(n)] or nodes
    cores = int(sum(n.resources.get("CPU", 0) for n in unmarked))
    if cores:
        pools.append(RayPool(name="cpu", count=cores, resources={"CPU": 1.0}))
    return pools


def checked(declared: Sequence[RayPool], nodes: Sequence[Node]) -> list[RayPool]:
    """Return the declared pools, each with its resources filled in.

    Raises:
        ConfigError: If the cluster lacks one of them, or has too little of it; one line each.
    """
    pools = [p.model_copy(update={"resources": _per_device(p)}) for p in declared]
    faults = [fault for pool in pools if (fault := _fault(pool, nodes)) is not None]
    if faults:
        raise ConfigError("\n".join([*faults, f"the cluster has: {said_of(nodes)}"]))
    return pools


def of_pool(pool: RayPool, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that have a device of a checked pool."""
    return [node for node in nodes if _is_of(pool, node) and _fits(pool, node)]


def contract(pool: RayPool, classes: Mapping[str, int] = _NO_CLASSES) -> Pool:
    """Return a pool as hardware mappers see it.

    Args:
        pool: The pool.
        classes: Further classes of engines, each on its own pool: name -> engines.
    """
    own = pool.name in classes
    return Pool(
        name=pool.name,
        device=pool.device,
        count=classes[pool.name] if own else pool.count,
        flops_per_s=pool.flops_per_s,
        bytes_per_s=pool.bytes_per_s,
        price_per_hour=pool.price_per_hour,
        resources=dict(pool.resources),
        roles=("engines",) if own else pool.roles,
    )


def slots_of(
    placement: Placement,
    pools: Sequence[RayPool],
    num_parts: Mapping[str, int],
    classes: Mapping[str, int] = _NO_CLASSES,
    engine_devices: int = 1,
) -> list[ResourceSlot]:
    """Return the slot of each worker.

    Args:
        placement: The mapper's placement.
        pools: The pools.
        num_parts: Number of workers by role: ``engine`` (the first class), ``trainer`` and ``env``.
        classes: Further classes of engines: pool -> number.
        engine_devices: Number of devices per engine: one slot, so all on one node.

    Raises:
        ConfigError: If a pool has fewer devices than the workers need.
    """
    by_name = {pool.name: pool for pool in pools}
    chosen = {
        "engine": [
            *engine_pools(_without(placement, classes, pools), num_parts["engine"]),
            *(name for name, count in classes.items() for _ in range(count)),
        ],
        "trainer": [placement.trainer] * num_parts["trainer"],
        "env": _round(sorted(set(placement.envs.values())), num_parts["env"]),
    }
    for name in sorted({n for names in chosen.values() for n in names} - set(by_name)):
        near = did_you_mean(name, list(by_name))
        raise ConfigError(f"the placement names a pool {name!r} that is not in the cluster.{near}")
    _check_capacity(chosen, by_name, engine_devices)
    where = [(by_name[name], role) for role, names in chosen.items() for name in names]
    return [slot(pool, role, engine_devices) for pool, role in where]


def slot(pool: RayPool, role: str, engine_devices: int = 1) -> ResourceSlot:
    """Return a slot of a pool for one worker; an engine's slot has all of its devices."""
    num = engine_devices if role == "engine" else 1
    takes = {key: num * amount for key, amount in _takes(pool, role).items()}
    return ResourceSlot(role, pool.name, takes, pool.labels)


def check_nodes(
    slots: Sequence[ResourceSlot],
    pools: Sequence[RayPool],
    nodes: Sequence[Node],
    engine_devices: int,
) -> None:
    """Refuse engines with more devices than a node has: a slot is on one node.

    Raises:
        ConfigError: If there are any; names the pool and the devices of its nodes.
    """
    by_name = {pool.name: pool for pool in pools}
    wanted = Counter(slot.pool for slot in slots if slot.role == "engine")
    for name, num in wanted.items() if engine_devices > 1 else ():
        pool = by_name[name].model_copy(update={"resources": _per_device(by_name[name])})
        there = [(n, f) for n in nodes if _is_of(pool, n) and (f := _fits(pool, n))]
        capacity = sum(fits // engine_devices for _, fits in there)
        if capacity < num:
            have = ", ".join(f"{node.name} has {fits}" for node, fits in there)
            raise ConfigError(
                f"pool {name!r}: {num} engine(s) take {engine_devices} devices of one node each, "
                f"but there are slots for {capacity} ({have}): use fewer devices per engine, use "
                "fewer engines, or add nodes"
            )


def engine_pools(placement: Placement, num_engines: int) -> list[str]:
    """Return the pool of each engine: by the shares of the placement, each used pool one at least.

    A mapper may set it. Otherwise engines left over by rounding go to the largest remainders.

    Raises:
        ConfigError: If there are fewer engines than pools.
    """
    said = [name for name, count in placement.num_engines.items() for _ in range(count)]
    if len(said) == num_engines:
        return said
    shares: dict[str, float] = {}
    for pools in placement.engines.values():
        for name, share in pools.items():
            if share > 0:
                shares[name] = shares.get(name, 0.0) + share
    if len(shares) > num_engines:
        raise ConfigError(
            f"runtime.num_engines is {num_engines}, but the placement has engines on "
            f"{len(shares)} pools ({', '.join(shares)}): raise it to {len(shares)} or more"
        )
    total = sum(shares.values())
    exact = {name: share / total * num_engines for name, share in shares.items()}
    counts = {name: max(1, math.floor(n)) for name, n in exact.items()}
    while sum(counts.values()) < num_engines:
        counts[max(counts, key=lambda name: exact[name] - counts[name])] += 1
    while sum(counts.values()) > num_engines:
        most = [name for name in counts if counts[name] > 1]
        counts[max(most, key=lambda name: counts[name] - exact[name])] -= 1
    return [name for name, n in counts.items() for _ in range(n)]


def _without(
    placement: Placement, classes: Mapping[str, int], pools: Sequence[RayPool]
) -> Placement:
    """Return the pools for the engines of the first class, without those of other classes."""
    if not classes:
        return placement
    shares = {
        env_id: {name: share for name, share in of_it.items() if name not in classes}
        for env_id, of_it in placement.engines.items()
    }
    if not any(share > 0 for of_it in shares.values() for share in of_it.values()):
        able = [p.name for p in pools if not p.roles or "engines" in p.roles]
        left = next((name for name in able if name not in classes), placement.trainer)
        shares = {"": {left: 1.0}}
    counts = {name: n for name, n in placement.num_engines.items() if name not in classes}
    return replace(placement, engines=shares, num_engines=counts)


def said_of(nodes: Sequence[Node]) -> str:
    """Return a cluster's nodes and their resources as text."""
    return "; ".join(f"{n.title}: {_amounts(_shown(n))}" for n in nodes) or "no node that is up"


def local_resources(pools: Sequence[RayPool], num_parts: int, num_cores: int) -> dict[str, float]:
    """Return the resources for a cluster that is started for a run.

    A machine can run more processes than it has cores; marks of pools are created as declared. Ray
    detects the GPUs.
    """
    wanted: dict[str, float] = {}
    for pool in pools:
        for key, amount in _per_device(pool).items():
            if key != "GPU" and not key.startswith(ACCELERATOR):
                wanted[key] = wanted.get(key, 0.0) + amount * pool.count
    return {**wanted, "CPU": max(float(num_cores), float(num_parts), wanted.get("CPU", 0.0))}


def _per_device(pool: RayPool) -> dict[str, float]:
    return dict(pool.resources) or {("CPU" if pool.device.lower() == "cpu" else "GPU"): 1.0}


def _takes(pool: RayPool, role: str) -> dict[str, float]:
    """Return the reservation of a worker: an env worker never takes an accelerator."""
    device = _per_device(pool)
    if role != "env":
        return device
    rest = {k: v for k, v in device.items() if k != "GPU" and not k.startswith(ACCELERATOR)}
    return rest or {"CPU": 1.0}


def _check_capacity(
    chosen: Mapping[str, Sequence[str]], by_name: Mapping[str, RayPool], engine_devices: int
) -> None:
    each = {"engine": engine_devices}
    for name, pool in by_name.items():
        num = {role: list(names).count(name) for role, names in chosen.items()}
        on_device = [r for r in num if num[r] and _takes(pool, r) == _per_device(pool)]
        total = sum(num[role] * each.get(role, 1) for role in on_device)
        if total > pool.count:
            parts = ", ".join(
                f"{num[role]} {role}" + (f" of {each[role]}" if each.get(role, 1) > 1 else "")
                for role in on_device
            )
            what = "workers on it" if engine_devices == 1 else "devices' worth of workers on it"
            raise ConfigError(
                f"pool {name!r} has {pool.count} device(s), but the run places {total} {what} "
                f"({parts}): ask for fewer (runtime.num_engines, num_env_workers), give it "
                "more devices, or let several workers share one (resources: {GPU: 0.5}, with the "
                "count doubled)"
            )


def _fault(pool: RayPool, nodes: Sequence[Node]) -> str | None:
    """Return what the cluster lacks of a pool; None if nothing."""
    labelled = [n for n in nodes if _is_of(pool, n)]
    counts = [_fits(pool, node) for node in labelled]
    wants = _amounts(pool.resources) + (
        f" on nodes with {dict(pool.labels)}" if pool.labels else ""
    )
    if not any(counts):
        return f"pool {pool.name!r}: no node of the cluster has {wants}"
    if sum(counts) < pool.count:
        return (
            f"pool {pool.name!r}: {pool.count} devices are requested, but the cluster has "
            f"{sum(counts)} ({wants} each): lower its count or add nodes"
        )
    return None


def _is_of(pool: RayPool, node: Node) -> bool:
    return pool.labels.items() <= node.labels.items()


def _fits(pool: RayPool, node: Node) -> int:
    return min(int(node.resources.get(k, 0) / v + 1e-6) for k, v in pool.resources.items())


def _accelerator(node: Node) -> str:
    kinds = [key for key in node.resources if key.startswith(ACCELERATOR)]
    return kinds[0].removeprefix(ACCELERATOR) if kinds else ""


def _marks(node: Node) -> list[str]:
    return list(_shown(node).keys() - {"CPU", "GPU"} if node.resources else ())


def _shown(node: Node) -> dict[str, float]:
    hidden = ("node:", "memory", "object_store_memory", ACCELERATOR)
    kept = {k: v for k, v in node.resources.items() if not k.startswith(hidden)}
    return {k: kept[k] for k in sorted(kept)}


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {amount:g}" for key, amount in resources.items())


def _round(names: Sequence[str], n: int) -> list[str]:
    return [names[i % len(names)] for i in range(n)]
