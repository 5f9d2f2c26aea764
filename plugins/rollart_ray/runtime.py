"""A Ray cluster: each worker of a run is an actor, on the pool that the mapper chose for it.

    connect                    place                           new_part
    start or join a cluster    slots ──> placement groups      an actor on a slot of its role
    nodes ──> pools            check the nodes they are on

Takes: a run config and a run directory. Gives: the workers that a
:class:`rollart_core.runtime.workers.WorkersRuntime` offers. Never: places a worker (the mapper
does), or starts anything on a node that lacks what the worker needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from rollart_core.config.resolve import Resolution, ResolvedRun
from rollart_core.config.runtime import RayPool
from rollart_core.config.runtime import RayRuntime as RayConfig
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.contracts.sandbox import RUN_VARIABLE
from rollart_core.errors import ClusterLost, ConfigError, UserError
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.runtime.inline import shared_folder
from rollart_core.runtime.placement import demand_of, place
from rollart_core.runtime.prepare import unset_variables
from rollart_core.runtime.records import StoredRecords, StoreRecords, pack
from rollart_core.runtime.worker import Worker
from rollart_core.runtime.workers import WorkersRuntime
from rollart_ray import nodes as ray_nodes
from rollart_ray import pools as ray_pools
from rollart_ray.cluster import RayCluster, address_of
from rollart_ray.nodes import NodeChecks, refuse
from rollart_ray.pools import Node, ResourceSlot
from rollart_ray.worker import ActorSettings, RayWorker, RecordObject, Reservation

T = TypeVar("T")
LOOK_S = 1.0
"""Interval of checks of the cluster's head."""
NODE_LOST_S = 3.0
"""Time after which an unreachable raylet of a cluster that this run started is gone."""
REMOVE_S = 10.0
"""Time limit for a node to remove a run's files in its memory."""


class RayRuntime(WorkersRuntime):
    """Starts and ends the workers on a Ray cluster."""

    has_own_devices = True

    def __init__(self, run: ResolvedRun, run_dir: Path) -> None:
        """Describe the run; nothing is started yet."""
        super().__init__(run, run_dir, run_dir / "shared")
        assert isinstance(run.config.runtime, RayConfig)
        self._ray = run.config.runtime
        self._classes = {one.name: one.count for one in run.engines}
        num_parts = sum((*_num_workers(self._ray).values(), *self._classes.values()))
        self._cluster = RayCluster(self._ray, run_dir.name, num_parts)
        self._pools: list[RayPool] = []
        self._reserved: dict[tuple[str, int], Reservation] = {}
        self._workers: WeakSet[RayWorker] = WeakSet()
        self._location: str | None = None
        self._sharing: Node | None = None  # where the trainer keeps weights in memory
        self._checks: NodeChecks | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_env_workers(self) -> int:
        """The number of env workers to start."""
        return self._ray.num_env_workers

    # Before anything starts

    @classmethod
    def check_pools(cls, run: Resolution) -> None:
        """Place the run on the pools that its config declares, without a cluster.

        Raises:
            ConfigError: If the mapper cannot place it, or a pool has too few devices.
        """
        ray = run.config.runtime
        assert isinstance(ray, RayConfig)
        classes = {one.name: one.count for one in run.config.engines}
        pools = [ray_pools.contract(pool, classes) for pool in ray.pools]
        placement = place(run, pools, demand_of(run))
        ray_pools.slots_of(placement, ray.pools, _num_workers(ray), classes, run.engine_devices)

    async def connect(self) -> Sequence[Pool]:
        """Start or join the cluster, check its nodes, and return its pools.

        Raises:
            ConfigError: If a variable is not set, there is no such cluster, a pool is missing, or
                a node has other versions than this process.
        """
        refuse(problem.within() for problem in unset_variables(self._ray))
        self._cluster.open()
        nodes = self._cluster.nodes()
        self._watching = asyncio.create_task(self._watch_over(nodes), name="watch the cluster")
        declared = self._ray.pools
        self._pools, faults = list(declared), []
        try:
            self._pools = (
                ray_pools.checked(declared, nodes) if declared else ray_pools.found_out(nodes)
            )
        except ConfigError as e:
            faults = str(e).splitlines()
        if self._cluster.is_own and all(pool.device == "cpu" for pool in self._pools):
            self.trainer_host = "127.0.0.1"
        self._checks = NodeChecks(self.run, self.run_dir, self._cluster)
        refuse([*faults, *await self._checks.versions(nodes)])
        return [ray_pools.contract(pool, self._classes) for pool in self._pools]

    async def place(self, placement: Placement) -> None:
        """Reserve a slot for every worker, and check the nodes that they are on.

        Raises:
            ConfigError: If there is no capacity, or a node lacks what its workers need.
        """
        assert self._checks is not None
        group = self.run.engine_devices
        workers = _num_workers(self._ray)
        slots = ray_pools.slots_of(placement, self._pools, workers, self._classes, group)
        ray_pools.check_nodes(slots, self._pools, self._cluster.nodes(), group)
        nodes: dict[str, list[Node]] = {}
        for roles, strategy in self._together():
            mine = [slot for slot in slots if slot.role in roles]
            for slot, node in zip(mine, await self._reserve(mine, strategy), strict=True):
                nodes.setdefault(slot.role, []).append(node)
        (self.run_dir / "logs").mkdir(exist_ok=True)
        reach = self.run.weights.spec.reach
        if reach == "machine":
            self._shared = shared_folder(self.run_dir.name)
        classes = [slot.pool for slot in slots if slot.role == "engine"]
        refuse(await self._checks.workers(nodes, classes, self._shared))
        trainer = nodes["trainer"][0]
        if reach == "machine":
            self._sharing = trainer
        if reach == "network" and self._may_be_elsewhere(trainer, nodes["engine"]):
            self._location = await self._address_of_weights(trainer)

    async def ask(self, question: Callable[[], T]) -> dict[str, T]:
        """Run a function on each node of the placed workers."""
        found = {
            node
            for reserved in self._reserved.values()
            if (node := self._cluster.nodes_of(reserved.group)[reserved.index]) is not None
        }
        nodes = sorted(found, key=lambda node: node.title)
        answers = await self._cluster.ask(question, nodes, ray_nodes.SANDBOX_S)
        return {node.title: answer for node, answer in answers.items()}

    def weights_location(self) -> str:
        """Return the location at which trainer and engines open the weight channel."""
        return self._location or super().weights_location()

    # Parts

    def store_records(self) -> StoreRecords:
        """Return a store in the cluster's memory, or in files of a cluster on this machine.

        Ray ends a process without a message if it uses the object store of a dead raylet.
        """
        if self._cluster.is_own:
            return super().store_records()

        @contextlib.asynccontextmanager
        async def store(records: Sequence[Any]) -> AsyncIterator[StoredRecords]:
            yield RecordObject(await asyncio.to_thread(self._cluster.put, pack(records)))

        return store

    def new_worker(self, role: str, index: int = 0) -> Worker:
        """Return an unstarted actor; it takes a slot of its role when it starts."""
        threads = {
            "engine": self._ray.engine_threads,
            "trainer": self._ray.trainer_threads,
            "model": 2,
        }
        num_threads = str(threads.get(role, 1))
        name = f"{role}-{index}" if index else role
        settings = ActorSettings(
            environment={
                "OMP_NUM_THREADS": num_threads,
                "MKL_NUM_THREADS": num_threads,
                "TOKENIZERS_PARALLELISM": "false",
                RUN_VARIABLE: self.run_dir.name,
            },
            log_path=str(self.run_dir / "logs" / f"{name}.log"),
            sys_path=[p for p in sys.path if p],
        )
        worker = RayWorker(
            name,
            self._cluster,
            lambda: self._reservation(role, index),
            settings,
            variables={name: os.environ[name] for name in self._ray.env_vars},
        )
        self._workers.add(worker)
        return worker

    def pool_of(self, role: str, index: int) -> str:
        """Return the name of the pool a worker is on."""
        return self._reserved[role, index].slot.pool

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        """Reserve a slot for one more worker.

        Raises:
            UserError: If there is no capacity.
        """
        pools = [p for p in self._pools if p.name == pool] or self._pools_of(role)
        for found in pools:
            try:
                slot = ray_pools.slot(found, role, self.run.engine_devices)
                await self._reserve([slot], "PACK", index)
                return
            except ConfigError:
                continue
        where = " or ".join(p.name for p in pools)
        raise UserError(f"no capacity for one more {role} on {where}; free: {self._cluster.free()}")

    async def release_reservation(self, role: str, index: int) -> None:
        """Release the slot of a worker that has left permanently."""
        await super().release_reservation(role, index)
        reserved = self._reserved.pop((role, index), None)
        if reserved is not None and all(
            b.group is not reserved.group for b in self._reserved.values()
        ):
            self._cluster.release(reserved.group)

    async def close(self) -> None:
        """Stop every worker, release reservations, and leave or stop the cluster."""
        await cancel_and_wait(self._watching)
        try:
            await super().close()
            await self._remove_shared()
        finally:
            self._cluster.close()

    # Inside

    async def _remove_shared(self) -> None:
        """Remove the shared files of trainer and engines in the memory of another machine.

        A node that does not respond keeps them.
        """
        node, self._sharing = self._sharing, None
        if node is None or self._cluster.is_own or self._cluster.lost:
            return
        question = ray_nodes.ask_to_remove(str(self._shared))
        with contextlib.suppress(Exception):
            await self._cluster.ask(question, [node], REMOVE_S)

    def _may_be_elsewhere(self, trainer: Node, engines: Sequence[Node]) -> bool:
        """Return whether an engine is, or may be later, on another machine than the trainer."""
        names = {reserved.slot.pool for (r, _), reserved in self._reserved.items() if r == "engine"}
        pools = [pool for pool in self._pools if pool.name in names]
        nodes = self._cluster.nodes()
        able = [node for pool in pools for node in ray_pools.of_pool(pool, nodes)]
        return any(node.address != trainer.address for node in (*engines, *able))

    def _together(self) -> list[tuple[tuple[str, ...], str]]:
        """Return the roles to reserve together, and the strategy: spread or packed."""
        addresses = {node.address for node in self._cluster.nodes()}
        if self.run.weights.spec.reach == "machine" and len(addresses) > 1:
            return [(("engine", "trainer"), "STRICT_PACK"), (("env",), "SPREAD")]
        return [(("engine",), "SPREAD"), (("trainer",), "PACK"), (("env",), "SPREAD")]

    def _pools_of(self, role: str) -> list[RayPool]:
        names = list(
            dict.fromkeys(b.slot.pool for (r, _), b in self._reserved.items() if r == role)
        )
        return [pool for name in names for pool in self._pools if pool.name == name]

    async def _reserve(
        self, slots: Sequence[ResourceSlot], strategy: str, first_index: int = 0
    ) -> list[Node]:
        """Reserve slots, remember them by role and number, and return their nodes."""
        try:
            group = await self._cluster.reserve(slots, strategy)
        except TimeoutError:
            raise ConfigError(self._no_capacity(slots, strategy)) from None
        count: dict[str, int] = {}
        for index, slot in enumerate(slots):
            number = count.get(slot.role, first_index)
            count[slot.role] = number + 1
            self._reserved[slot.role, number] = Reservation(slot, group, index)
        nodes = self._cluster.nodes_of(group)
        found = [node for node in nodes if node is not None]
        if len(found) < len(nodes):
            raise ConfigError("a node of the cluster was lost while slots were reserved on it")
        return found

    async def _reservation(self, role: str, index: int) -> Reservation:
        """Return the slot of a worker: its own, or for env workers any free one.

        An env worker whose node is gone shares the slot of another one.
        """
        if (role, index) in self._reserved and role != "env":
            return self._reserved[role, index]
        envs = [reserved for (r, _), reserved in self._reserved.items() if r == "env"]
        up = [b for b in envs if self._cluster.nodes_of(b.group)[b.index] is not None] or envs
        free = [reserved for reserved in up if reserved.is_free]
        if role == "env" and free:
            return free[0]
        beside = min(up, key=lambda reserved: reserved.num_beside)
        beside.num_beside += 1
        return Reservation(ResourceSlot(role, beside.slot.pool, {}, {}), beside.group, beside.index)

    async def _address_of_weights(self, trainer: Node) -> str:
        found = await self._cluster.ask(ray_nodes.ask_for_a_port(trainer.address), [trainer])
        return f"tcp://{secrets.token_hex(16)}@{trainer.address}:{found[trainer]}"

    async def _watch_over(self, nodes: Sequence[Node]) -> None:
        """Check that the cluster is usable; if it is not for too long, end the run.

        Without its head Ray would end this process after a minute, without a message. The raylet of
        a cluster that this run started is checked too: it is the only node, Ray does not restart
        it, and workers cannot run without it.
        """
        head = f"the head of the Ray cluster at {self._cluster.address}"
        looked_at = [(head, address_of(self._cluster.address), self._ray.head_lost_s)]
        if self._cluster.is_own:
            raylet = "the raylet of the Ray that this run started, its only node,"
            looked_at += [(raylet, (n.address, n.port), NODE_LOST_S) for n in nodes if n.port]
        loop = asyncio.get_running_loop()
        missed_s = {what: 0.0 for what, _, _ in looked_at}
        gone = ""
        while not gone:
            began = loop.time()
            await asyncio.sleep(LOOK_S)
            for what, (host, port), limit_s in looked_at:
                if await _reached(host, port):
                    missed_s[what] = 0.0
                    continue
                # Time in which this process was blocked does not count against the other one.
                missed_s[what] += min(loop.time() - began, 2 * LOOK_S)
                if missed_s[what] >= limit_s:
                    gone = what
        self._lose_cluster(gone)

    def _lose_cluster(self, what: str) -> None:
        """End the run, because a required process of the cluster is gone."""
        self._cluster.lost = True
        error = ClusterLost(
            f"{what} is gone; progress is kept; continue with: rollart run --resume {self.run_dir}"
        )
        if self.on_lost is not None:
            self.on_lost(error)
        for worker in list(self._workers):
            worker.lose(str(error))

    def _no_capacity(self, slots: Sequence[ResourceSlot], strategy: str) -> str:
        workers = {slot.role: sum(s.role == slot.role for s in slots) for slot in slots}
        what = " and ".join(f"{n} {role}" for role, n in workers.items())
        said = f"the cluster had no capacity for {what} within {self._ray.placement_s:g} s"
        if strategy == "STRICT_PACK":
            return (
                f"{said} on one machine, which weights: {self.run.config.weights.id} needs: take "
                "weights: collective, or disk with runs_dir on a file system that all nodes share"
            )
        return (
            f"{said} (free: {self._cluster.free()}): request fewer, wait until others are done, "
            "or raise runtime.placement_s"
        )


async def _reached(host: str, port: int) -> bool:
    """Return whether a process listens there.

    It runs in a thread, because a timer of a blocked loop could cancel a connection that the kernel
    has already completed.
    """

    def connect() -> bool:
        try:
            socket.create_connection((host, port), LOOK_S).close()
        except OSError:
            return False
        return True

    return await asyncio.to_thread(connect)


def _num_workers(config: RayConfig) -> dict[str, int]:
    """Return the number of workers by role; for engines, those of the first class."""
    num_ranks = config.num_trainer_ranks
    return {"engine": config.num_engines, "trainer": num_ranks, "env": config.num_env_workers}
