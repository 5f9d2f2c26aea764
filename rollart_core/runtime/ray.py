"""A Ray cluster: each part of a run is an actor, on the pool that the mapper chose for it.

    connect                    place                           new_part
    start or join a cluster    seats ──> placement groups      an actor on a free seat of its role
    nodes ──> pools            check the nodes they are on

Takes: a run config and a run directory. Gives: the parts that a
:class:`rollart_core.runtime.base.Runtime` offers. Never: turns Ray's token authentication off, or
leaves an actor, a placement group or a cluster that it started behind. No other module imports ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rollart_core.boxes.ledger import RUN_VARIABLE
from rollart_core.config import RayRuntime as RayConfig
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.errors import ClusterLost, ConfigError, PartDied, first_line
from rollart_core.resolve import ResolvedRun
from rollart_core.runtime import ray_local, ray_nodes, ray_pools
from rollart_core.runtime.frames import Answer, Call
from rollart_core.runtime.inline import shared_folder
from rollart_core.runtime.part import Part
from rollart_core.runtime.parts_runtime import PartsRuntime
from rollart_core.runtime.ray_actor import ActorSettings, PartActor
from rollart_core.runtime.ray_pools import Node, Seat

MAX_CONCURRENT_CALLS = 100_000
"""Of one actor; its own limits come first."""
NODE_ANSWER_S = 60.0
"""A node that does not start a small process within this is of no use."""
LOOK_S = 1.0
"""Between two looks at the cluster's head."""


class RayRuntime(PartsRuntime):
    """Starts and ends the parts on a Ray cluster."""

    def __init__(self, run: ResolvedRun, run_dir: Path) -> None:
        """Describe the run; nothing is started yet."""
        super().__init__(run, run_dir, run_dir / "shared")
        assert isinstance(run.config.runtime, RayConfig)
        self._ray_config: RayConfig = run.config.runtime
        self._cluster: _Cluster | None = None
        self._nodes: list[Node] = []
        self._pools: list[Any] = []
        self._berths: dict[str, list[_Berth]] = {}
        self._groups: list[Any] = []
        self._parts: WeakSet[RayPart] = WeakSet()
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_env_workers(self) -> int:
        """How many env workers to start."""
        return self._ray_config.num_env_workers

    # Before anything starts

    async def connect(self) -> Sequence[Pool]:
        """Start or join the cluster, check its nodes, and return its pools.

        Raises:
            ConfigError: When there is no such cluster, a pool is not there, or a node has other
                versions than this process.
        """
        self._cluster = _Cluster(
            self._ray_config, sum(self._num_parts().values()), self.run_dir.name
        )
        self._cluster.open()
        self._nodes = self._cluster.nodes()
        declared = self._ray_config.pools
        self._pools = (
            ray_pools.checked(declared, self._nodes)
            if declared
            else ray_pools.found_out(self._nodes)
        )
        await self._check_versions()
        self._watching = asyncio.create_task(self._watch_over(), name="watch the cluster")
        return [ray_pools.contract(pool) for pool in self._pools]

    async def place(self, placement: Placement) -> None:
        """Reserve a seat for every part, and check the nodes that they are on.

        Raises:
            ConfigError: When there is no room, or a node lacks what its parts need.
        """
        seats = ray_pools.seats_of(placement, self._pools, self._num_parts())
        (self.run_dir / "logs").mkdir(exist_ok=True)
        for roles, strategy in self._together():
            mine = [seat for seat in seats if seat.role in roles]
            group = await self._reserve(mine, strategy)
            for index, seat in enumerate(mine):
                berth = _Berth(seat, group, index)
                self._berths.setdefault(seat.role, []).append(berth)
        await self._share_folder()

    def new_part(self, role: str, index: int = 0) -> Part:
        """Return an unstarted actor; it takes a free seat of its role when it starts."""
        assert self._cluster is not None
        threads = {
            "engine": self._ray_config.engine_threads,
            "trainer": self._ray_config.trainer_threads,
            "model": 2,
        }
        num_threads = str(threads.get(role, 1))
        settings = ActorSettings(
            environment={
                "OMP_NUM_THREADS": num_threads,
                "MKL_NUM_THREADS": num_threads,
                "TOKENIZERS_PARALLELISM": "false",
                RUN_VARIABLE: self.run_dir.name,
            },
            log_path=str(self.run_dir / "logs" / f"{role}{f'-{index}' if index else ''}.log"),
            sys_path=[p for p in sys.path if p],
        )
        name = f"{role}-{index}" if index else role
        part = RayPart(name, lambda: self._berth(role, index), settings)
        self._parts.add(part)
        return part

    def pool_of(self, role: str, index: int) -> str:
        """Return the name of the pool a part is on."""
        return self._berths[role][index].seat.pool

    async def close(self) -> None:
        """End every part, give back what was reserved, and leave or end the cluster."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        try:
            await super().close()
        finally:
            if self._cluster is not None:
                self._cluster.close(self._groups)
                self._cluster = None

    # Inside

    def _num_parts(self) -> dict[str, int]:
        config = self._ray_config
        num_ranks = getattr(config, "num_trainer_ranks", 1)
        return {"engine": config.num_engines, "trainer": num_ranks, "env": config.num_env_workers}

    def _together(self) -> list[tuple[tuple[str, ...], str]]:
        """Return which roles are reserved at once, and how: spread out or close together."""
        apart: list[tuple[tuple[str, ...], str]] = [
            (("engine",), "SPREAD"),
            (("trainer",), "PACK"),
            (("env",), "SPREAD"),
        ]
        one_machine = len({node.address for node in self._nodes}) == 1
        if self.run.weights.spec.reach != "machine" or one_machine:
            return apart
        return [(("engine", "trainer"), "STRICT_PACK"), (("env",), "SPREAD")]

    async def _reserve(self, seats: Sequence[Seat], strategy: str) -> Any:
        import ray
        from ray.util import placement_group

        more: dict[str, Any] = {}
        if any(seat.labels for seat in seats):
            more["bundle_label_selector"] = [dict(seat.labels) for seat in seats]
        group = placement_group([dict(s.resources) for s in seats], strategy=strategy, **more)
        self._groups.append(group)
        limit_s = self._ray_config.placement_s
        try:
            await asyncio.wait_for(_future_of(group.ready()), limit_s)
        except TimeoutError:
            free = "; ".join(f"{k} {v:g}" for k, v in sorted(ray.available_resources().items()))
            raise ConfigError(_no_room(seats, strategy, limit_s, free)) from None
        return group

    def _berth(self, role: str, index: int) -> _Berth:
        """Return the seat a part takes: its own, or for env workers any that is free."""
        berths = self._berths.get(role) or self._berths["env"]
        if role in ("model", "demonstrator"):  # beside the first env worker, for a while
            return _Berth(Seat(role, berths[0].seat.pool, {}, {}), berths[0].group, berths[0].index)
        if role != "env" and index < len(berths):
            return berths[index]
        return next((berth for berth in berths if berth.is_free), berths[index % len(berths)])

    async def _check_versions(self) -> None:
        assert self._cluster is not None
        names = {p.distribution for p in self.run.plugins} | {"rollart", "ray"}
        names = {n for n in names if ray_nodes.versions([n])[n] != ray_nodes.MISSING}
        answers = await self._cluster.ask(ray_nodes.ask_versions(sorted(names)), self._nodes)
        theirs = {node.title: found for node, found in answers.items()}
        faults = ray_nodes.differences(ray_nodes.versions(sorted(names)), theirs)
        if faults:
            raise ConfigError("\n".join(faults))

    async def _share_folder(self) -> None:
        """Find a folder that trainer and engines can both reach, and make sure that they do."""
        reach = self.run.weights.spec.reach
        if reach == "machine":
            self._shared = shared_folder(self.run_dir.name)

    async def _watch_over(self) -> None:
        """Look whether the cluster's head can be reached; when not for too long, the run is over.

        Ray would end this process after a minute, without a word to anybody.
        """
        assert self._cluster is not None
        host, _, port = self._cluster.address.rpartition(":")
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < self._ray_config.head_lost_s:
            await asyncio.sleep(LOOK_S)
            if await _reached(host.strip("[]"), int(port)):
                seen = loop.time()
        self._cluster.lost = True
        error = ClusterLost(
            f"the head of the Ray cluster at {self._cluster.address} is gone; what was done so "
            f"far is kept: rollart run --resume {self.run_dir}"
        )
        if self.on_lost is not None:
            self.on_lost(error)
        for part in list(self._parts):
            part.lose(str(error))


@dataclass(slots=True, eq=False)
class _Berth:
    """A seat that is reserved: a bundle of a placement group."""

    seat: Seat
    group: Any
    index: int
    taken_by: RayPart | None = field(default=None)

    @property
    def is_free(self) -> bool:
        """True when no living part has it."""
        return self.taken_by is None or not self.taken_by.expected


class RayPart:
    """One part of a run in an actor; see :class:`rollart_core.runtime.part.Part`.

    Args:
        name: What errors and the log call it.
        berth: Returns the seat it takes.
        settings: How its process is set up.
    """

    def __init__(self, name: str, berth: Callable[[], _Berth], settings: ActorSettings) -> None:
        self.name = name
        self.on_death: Callable[[RayPart], None] | None = None
        self.pid: int | None = None
        """Of its process, on its node."""
        self._find_berth = berth
        self._settings = settings
        self._actor: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._gone: str | None = None
        self._closing = False
        self._calls: set[asyncio.Future[Any]] = set()
        self._ids = itertools.count()

    @property
    def alive(self) -> bool:
        """True while it can be called."""
        return self._actor is not None and self._gone is None

    @property
    def expected(self) -> bool:
        """True while its seat is not to be given away."""
        return self._gone is None and not self._closing

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Bring the actor up and build the part in it."""
        berth = self._find_berth()
        berth.taken_by = self
        self._actor = _new_actor(berth, self._settings)
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.name}")
        self.pid = await self._answer(self._actor.hello.remote())
        if factory is not None:
            await self.call("__build__", factory, dict(kwargs or {}))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the part (or ``"module:function"``) and wait for its answer.

        Raises:
            PartDied: When the actor is gone, before or meanwhile.
            Exception: Whatever the method raised.
        """
        if not self.alive:
            raise PartDied(self._obituary())
        frame = pickle.dumps(Call(next(self._ids), method, args, kwargs), protocol=5)
        answer: Answer = pickle.loads(await self._answer(self._actor.call.remote(frame)))
        if answer.error is not None:
            raise answer.error
        return answer.value

    def kill(self) -> None:
        """End the actor now, as if it had died."""
        if self._actor is not None:
            import ray

            with contextlib.suppress(Exception):  # of a cluster that is gone as well
                ray.kill(self._actor, no_restart=True)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Let the actor close what it has open, and end it after ``grace_s`` at the latest."""
        self._closing = True
        if self.alive:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(grace_s):
                    await self._answer(self._actor.leave.remote())
            self.kill()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=grace_s)
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._bury("closed")

    def lose(self, why: str) -> None:
        """Treat it as gone: its cluster is."""
        self._bury(why)

    async def _answer(self, ref: Any) -> Any:
        """Wait for an object of Ray's.

        Raises:
            PartDied: When the actor is gone, or its node cannot be reached.
        """
        from ray.exceptions import RayError

        future = _future_of(ref)
        self._calls.add(future)
        try:
            return await future
        except RayError as e:
            self._bury(_reason(e))
            raise PartDied(self._obituary()) from None
        finally:
            self._calls.discard(future)

    async def _watch(self) -> None:
        with contextlib.suppress(PartDied):
            await self._answer(self._actor.live.remote())

    def _bury(self, why: str) -> None:
        if self._gone is not None:
            return
        self._gone = why
        self.kill()  # one that only cannot be reached must not go on
        for future in self._calls:
            if not future.done():
                future.set_exception(PartDied(self._obituary()))
        if not self._closing and self.on_death is not None:
            self.on_death(self)

    def _obituary(self) -> str:
        log = self._settings.log_path
        where = f"; see {log}" if log and os.path.exists(log) else ""
        return f"the {self.name} actor is gone ({self._gone or 'not started'}){where}"


class _Cluster:
    """This process's tie to a Ray cluster, its own or another's.

    Raises:
        ConfigError: When ray is not installed.
    """

    def __init__(self, config: RayConfig, num_parts: int, run_name: str) -> None:
        if find_spec("ray") is None:
            raise ConfigError("runtime: ray needs Ray: pip install 'rollart[ray]'")
        self._config = config
        self._num_parts = num_parts
        self._run_name = run_name
        self._own: ray_local.LocalFolder | None = None
        self._stack = ExitStack()
        self.address = ""
        self.lost = False

    def open(self) -> None:
        """Start or join the cluster.

        In the thread that lasts as long as the run: Ray's processes die with the thread that
        started them.

        Raises:
            ConfigError: When that cannot be done.
        """
        if self._config.address is None:
            self._start()
        else:
            self._join(self._config.address)
        import ray

        self.address = ray.get_runtime_context().gcs_address

    def nodes(self) -> list[Node]:
        """Return the nodes that are up."""
        import ray

        return ray_pools.nodes_of(ray.nodes())

    async def ask(self, question: Callable[[], Any], nodes: Iterable[Node]) -> dict[Node, Any]:
        """Run a function on each of these nodes, all at once.

        Raises:
            ConfigError: When a node does not answer; says which and why.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = list(nodes)
        task = ray.remote(question)

        async def answer(node: Node) -> Any:
            there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            ref = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
            try:
                return await asyncio.wait_for(_future_of(ref), NODE_ANSWER_S)
            except TimeoutError:
                raise ConfigError(f"node {node.title} does not answer") from None
            except ray.exceptions.RayError as e:
                raise ConfigError(f"node {node.title} cannot answer: {_reason(e)}") from None

        return dict(zip(asked, await asyncio.gather(*map(answer, asked)), strict=True))

    def close(self, groups: Iterable[Any]) -> None:
        """Give placement groups back, and leave the cluster or end it."""
        import ray
        from ray.util import remove_placement_group

        for group in [] if self.lost else groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        with _signals_kept():
            ray.shutdown()
        self._stack.close()
        if self._own is not None:
            self._own.remove()
            self._own = None

    def _start(self) -> None:
        config = self._config
        self._own = ray_local.LocalFolder()
        self._stack.enter_context(ray_local.variables(self._own.environment()))
        resources = ray_pools.local_resources(config.pools, self._num_parts, os.cpu_count() or 1)
        self._init(
            "local",
            include_dashboard=False,
            num_cpus=resources.pop("CPU"),
            resources=resources,
            object_store_memory=ray_local.OBJECT_STORE_BYTES,
            _temp_dir=self._own.temp_dir,
            _system_config=ray_local.health_settings(config.health_check_s),
        )

    def _join(self, address: str) -> None:
        self._init(address)

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
                raise ConfigError(_no_cluster(address, e)) from e


def _new_actor(berth: _Berth, settings: ActorSettings) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = dict(berth.seat.resources)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "max_concurrency": MAX_CONCURRENT_CALLS,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            berth.group, berth.index, placement_group_capture_child_tasks=False
        ),
    }
    return ray.remote(PartActor).options(**options).remote(settings)


async def _reached(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(LOOK_S * 3):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _future_of(ref: Any) -> asyncio.Future[Any]:
    """Return an object of Ray's as a future of this loop, which others may settle first."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error, None if error else done.result())

    ref.future().add_done_callback(deliver)
    return future


@contextlib.contextmanager
def _signals_kept() -> Any:
    """Keep this process's handlers of signals: Ray puts its own."""
    try:
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
        for number, handler in kept.items():
            signal.signal(number, handler)
    except ValueError:  # not the main thread: Ray does not touch them there
        pass


def _reason(error: Exception) -> str:
    """Return in one line what Ray says, in several, of an actor's or a task's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The node", "The "))]
    return first_line((telling or lines or [type(error).__name__])[-1 if telling else 0])


def _no_room(seats: Sequence[Seat], strategy: str, limit_s: float, free: str) -> str:
    parts = {seat.role: sum(s.role == seat.role for s in seats) for seat in seats}
    what = " and ".join(f"{n} {role}" for role, n in parts.items())
    said = f"the cluster had no room for {what} within {limit_s:g} s"
    if strategy == "STRICT_PACK":
        return (
            f"{said} on one machine, as weights: shared-memory needs: take weights: disk (with "
            "runs_dir on a file system that all nodes share) or weights: collective"
        )
    return f"{said} (free: {free}): ask for fewer, wait, or raise runtime.placement_s"


def _no_cluster(address: str, error: Exception) -> str:
    why = first_line(str(error)) or type(error).__name__
    if address == "local":
        return f"Ray cannot be started on this machine: {why}"
    return f"no Ray cluster to join at {address}: {why}"
