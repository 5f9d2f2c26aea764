"""The connection of this process to a Ray cluster: nodes, reservations, actors.

Takes: the address of a cluster, or none to start one. Gives: the Ray operations that the runtime
needs. Never: turns token authentication off, or leaves a cluster that it started running. Except
for :mod:`rollart_ray.local`, no other module imports ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, TypeVar

from rollart_core.config.runtime import RayRuntime as RayConfig
from rollart_core.errors import ConfigError, RollartError, WorkerDied, first_line
from rollart_ray import local as ray_local
from rollart_ray import pools as ray_pools
from rollart_ray.pools import Node, ResourceSlot
from rollart_ray.worker import ActorSettings, WorkerActor

MAX_CONCURRENT_CALLS = 100_000
"""Time limit of one actor; the worker's own limits are shorter."""
NODE_ANSWER_S = 60.0
"""Time limit for a node to start a small process."""
CONNECT_S = 10.0
"""Time limit for a connection to the head."""
GONE = "the Ray cluster is gone"

AnswerT = TypeVar("AnswerT")


class RayCluster:
    """A connection to a cluster.

    Args:
        config: The ``runtime`` section.
        run_name: Name of the run.
        num_parts: Number of actors; a started cluster gets one core for each.

    Raises:
        ConfigError: If ray is not installed.
    """

    def __init__(self, config: RayConfig, run_name: str, num_parts: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError(MISSING_RAY)
        self._config = config
        self._num_workers = num_parts
        self._run_name = run_name
        self._own: ray_local.LocalFolder | None = None
        self._stack = ExitStack()
        self._groups: list[Any] = []
        self._actor_class: Any = None
        self.address = ""
        self.lost = False
        """Set if the head is gone; no further calls are sent to it."""

    @property
    def is_own(self) -> bool:
        """True if this run started the cluster."""
        return self._config.address is None

    @property
    def patience_s(self) -> float:
        """Time limit for free resources and for the start of a process."""
        return self._config.placement_s

    def open(self) -> None:
        """Start or join the cluster.

        Call it in a thread that lasts as long as the run: Ray's processes end with the thread that
        started them.

        Raises:
            ConfigError: If that fails.
        """
        address = self._config.address
        if address is None:
            self._start()
        else:
            if _check_reached(address):
                self._stack.enter_context(ray_local.variables(ray_local.LOOPBACK))
            self._init(address)
        import ray

        self.address = ray.get_runtime_context().gcs_address
        self._actor_class = ray.remote(WorkerActor)

    def close(self) -> None:
        """Release reservations, and leave or stop the cluster; may be called twice."""
        if not self.address:
            self._clean()
            return
        import ray

        for group in [] if self.lost else list(self._groups):
            self.release(group)
        self.address = ""
        try:
            with _signals_kept():
                ray.shutdown()
        except Exception:
            if not self.lost:
                raise
        finally:
            self._clean()

    # Nodes

    def nodes(self) -> list[Node]:
        """Return the nodes that are up."""
        import ray

        return ray_pools.nodes_of(ray.nodes())

    async def ask(
        self, question: Callable[[], AnswerT], nodes: Iterable[Node], limit_s: float = NODE_ANSWER_S
    ) -> dict[Node, AnswerT]:
        """Run a function on each of these nodes concurrently.

        Raises:
            ConfigError: If a node does not respond; names the node and the reason.
        """
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = list(dict.fromkeys(nodes))
        task = ray.remote(question)

        async def answer(node: Node) -> AnswerT:
            there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            ref = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
            try:
                found: AnswerT = await asyncio.wait_for(future_of(ref), limit_s)
            except TimeoutError:
                raise ConfigError(f"node {node.title} does not answer") from None
            except RayError as e:
                raise ConfigError(f"node {node.title} cannot answer: {reason(e)}") from None
            return found

        return dict(zip(asked, await asyncio.gather(*map(answer, asked)), strict=True))

    # Reservations

    async def reserve(self, slots: Sequence[ResourceSlot], strategy: str) -> Any:
        """Reserve these slots, all or none; returns the placement group, a bundle a slot.

        Raises:
            TimeoutError: If there are no free resources for them within ``placement_s``.
        """
        from ray.util import placement_group

        more: dict[str, Any] = {}
        if any(slot.labels for slot in slots):
            more["bundle_label_selector"] = [dict(slot.labels) for slot in slots]
        group = placement_group([dict(s.resources) for s in slots], strategy=strategy, **more)
        self._groups.append(group)
        try:
            await asyncio.wait_for(future_of(group.ready()), self.patience_s)
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, group: Any) -> None:
        """Release a placement group."""
        from ray.util import remove_placement_group

        self._groups.remove(group)
        with contextlib.suppress(Exception):  # its cluster may be gone
            remove_placement_group(group)

    def nodes_of(self, group: Any) -> list[Node | None]:
        """Return the node of each bundle of a group; None for one whose node is gone."""
        from ray.util import placement_group_table

        by_id = {node.node_id: node for node in self.nodes()}
        where = placement_group_table(group)["bundles_to_node_id"]
        return [by_id.get(where[index]) for index in sorted(where)]

    def free(self) -> str:
        """Return the free resources as text."""
        import ray

        hidden = ("node:", "memory", "object_store_memory", "bundle")
        found = {
            key: amount
            for key, amount in sorted(ray.available_resources().items())
            if not key.startswith(hidden) and "_group_" not in key
        }
        return ", ".join(f"{key} {amount:g}" for key, amount in found.items()) or "nothing"

    def put(self, parts: Iterable[bytes | memoryview]) -> Any:
        """Store bytes in this node's object store, and return their reference.

        The object is freed with its last reference. Readers on one node share one copy.

        Raises:
            RollartError: If the store has no room.
        """
        import numpy as np
        import ray
        from ray.exceptions import ObjectStoreFullError

        content = np.frombuffer(b"".join(parts), dtype=np.uint8)  # bytes would be copied by readers
        try:
            return ray.put(content)
        except ObjectStoreFullError as e:
            raise RollartError(
                f"a batch of {content.nbytes} bytes does not fit in Ray's object store: "
                f"{reason(e)}; start Ray with a larger --object-store-memory"
            ) from e

    # Actors

    def new_actor(self, slot: ResourceSlot, group: Any, index: int, settings: ActorSettings) -> Any:
        """Return an actor on a bundle of a group; it starts in the background.

        Raises:
            WorkerDied: If the cluster is gone.
        """
        if self.lost or not self.address:
            raise WorkerDied(GONE)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(slot.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_concurrency": MAX_CONCURRENT_CALLS,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, index, placement_group_capture_child_tasks=False
            ),
        }
        return self._actor_class.options(**options).remote(settings)

    def kill(self, actor: Any) -> None:
        """Kill an actor now."""
        if self.lost or not self.address:
            return
        import ray

        with contextlib.suppress(Exception):  # its node may be gone as well
            ray.kill(actor, no_restart=True)

    async def answer(self, ref: Any) -> Any:
        """Wait for the result of an actor's call.

        Raises:
            WorkerDied: If the actor is gone, or its node cannot be reached.
        """
        from ray.exceptions import RayError

        try:
            return await future_of(ref)
        except RayError as e:
            raise WorkerDied(reason(e)) from None

    # Inside

    def _start(self) -> None:
        config = self._config
        self._own = ray_local.LocalFolder()
        self._stack.enter_context(ray_local.variables(self._own.environment()))
        ray_local.read_token_anew()
        resources = ray_pools.local_resources(config.pools, self._num_workers, os.cpu_count() or 1)
        self._init(
            "local",
            include_dashboard=False,
            num_cpus=int(resources.pop("CPU")),
            resources=resources,
            object_store_memory=ray_local.OBJECT_STORE_BYTES,
            _temp_dir=self._own.temp_dir,
            _system_config=ray_local.health_settings(config.health_check_s),
        )

    def _init(self, address: str, **settings: Any) -> None:
        import ray

        with _signals_kept():
            try:
                ray.init(
                    address=address,
                    namespace=self._run_name,
                    log_to_driver=False,
                    logging_level="ERROR",
                    **settings,
                )
            except Exception as e:
                self._clean()
                raise ConfigError(_no_cluster(address, e)) from e

    def _clean(self) -> None:
        self._stack.close()
        if self._own is not None:
            self._own.remove()
            self._own = None


MISSING_RAY = "runtime: ray needs Ray: pip install 'rollart[ray]'"


def future_of(ref: Any) -> asyncio.Future[Any]:
    """Return a Ray object as a future of this loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(error: BaseException | None, value: Any) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def deliver(done: Any) -> None:
        error = done.exception()
        with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits
            loop.call_soon_threadsafe(settle, error, None if error else done.result())

    ref.future().add_done_callback(deliver)
    return future


def reason(error: Exception) -> str:
    """Return Ray's multi-line message on the end of an actor or task in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    selected = [
        line for line in lines if line.startswith(("The actor is dead", "The node", "The "))
    ]
    if selected:
        return first_line(selected[-1])
    return first_line(lines[-1]) if lines else type(error).__name__


def address_of(gcs_address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``."""
    host, _, port = gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_reached(address: str) -> bool:
    """Check that a head listens there; return whether it is on the loopback address.

    Ray would retry for minutes, and then end this process.

    Raises:
        ConfigError: If none does.
    """
    if address == "auto":
        return False
    try:
        host, port = address_of(address)
    except ValueError:
        message = f"runtime.address {address!r}: must be auto, or the head's host:port"
        raise ConfigError(message) from None
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            return str(connection.getpeername()[0]).startswith(("127.", "::1"))
    except OSError as e:
        raise ConfigError(_no_cluster(address, e)) from e


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's signal handlers: Ray installs its own in the main thread."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    kept = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread
            for number, handler in kept.items():
                signal.signal(number, handler)


def _no_cluster(address: str, error: Exception) -> str:
    why = first_line(str(error)) or type(error).__name__
    if address == "local":
        return f"Ray cannot be started on this machine: {why}"
    if "auth" in type(error).__name__.lower() or "token" in why.lower():
        return (
            f"the Ray cluster at {address} refuses this process: {why}; set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        )
    mend = "start one with `ray start --head`, or leave runtime.address out to start a local one"
    return f"no Ray cluster to join at {address} ({why}): {mend}"
