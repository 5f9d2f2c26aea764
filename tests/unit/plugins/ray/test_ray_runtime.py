"""What the Ray runtime decides about weights and numbers of engines, on a cluster of stubs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clock import VirtualLoop
from support.pace import scaled

from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.config.runtime import RayPool
from rollart_core.contracts.hardware import Placement
from rollart_core.errors import ClusterLost, ConfigError
from rollart_ray import runtime as ray_runtime
from rollart_ray.pools import Node, ResourceSlot
from rollart_ray.runtime import RayRuntime

PORT = 4321


def node(address: str, **resources: float) -> Node:
    return Node(address * 2, address, address, {"CPU": 8.0, **resources}, {})


HOME = node("10.0.0.1", train=1, gen=1)
FURTHER = node("10.0.0.2", gen=1)
ENVS_ONLY = node("10.0.0.3")


class HeldUpLoop(VirtualLoop):
    """Its process can stand still for a while."""

    held_up_s = 0.0

    def time(self) -> float:
        return super().time() + self.held_up_s


class Cluster:
    """Puts what it can on its first node."""

    is_own = False
    lost = False

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self.closed = False
        self.gone = False
        self.held_there: Path | None = None
        """A folder of another machine: the driver cannot remove it, and finds none."""
        self.asked: list[tuple[Node, bool]] = []

    def nodes(self) -> list[Node]:
        return self._nodes

    async def reserve(self, slots: Sequence[ResourceSlot], strategy: str) -> Any:
        return list(slots)

    def nodes_of(self, group: Any) -> list[Node | None]:
        return [self._nodes[0]] * len(group)

    async def ask(self, question: Callable[[], Any], nodes: Sequence[Node], *_: Any) -> Any:
        if self.gone:
            raise ConfigError("a node does not answer")
        self.asked += [(node, self.closed) for node in nodes]
        if self.held_there is not None:
            self.held_there.mkdir()
        return {node: question() for node in nodes}

    def release(self, group: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


class NoFaults:
    async def workers(self, *_: Any) -> list[str]:
        return []


@pytest.fixture
def runtime_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(nodes: Sequence[Node], weights: str = "collective") -> Any:
        config, problems = validate(
            {
                "name": "stubs",
                "model": {"kind": "new"},
                "env": {"id": "toy/FrozenLake-v1"},
                "algorithm": "grpo",
                "weights": weights,
                "runtime": "ray",
                "stop": {"batches": 1},
            }
        )
        assert config is not None, problems
        cluster = Cluster(nodes)
        monkeypatch.setattr(ray_runtime, "RayCluster", lambda *_: cluster)
        monkeypatch.setattr(ray_runtime.ray_nodes, "ask_for_a_port", lambda _: lambda: PORT)
        (tmp_path / "run").mkdir(exist_ok=True)
        runtime: Any = RayRuntime(resolve_run(config), tmp_path / "run")
        runtime._checks = NoFaults()
        runtime._pools = [
            RayPool(name=name, count=1, resources={of: 1.0})
            for name, of in (("train", "train"), ("gen", "gen"), ("cpu", "CPU"))
        ]
        return runtime

    return make


PLACED = Placement(envs={"*": "cpu"}, engines={"*": {"gen": 1.0}}, trainer="train")


@pytest.mark.parametrize(
    ("nodes", "by_address"),
    [
        ([HOME], False),
        ([HOME, ENVS_ONLY], False),
        ([HOME, FURTHER], True),  # engine 0 is beside the trainer; a later one may not be
    ],
)
def test_weights_have_an_address_where_any_engine_may_be_elsewhere(
    runtime_on: Callable[..., Any], nodes: list[Node], by_address: bool
) -> None:
    runtime = runtime_on(nodes)
    asyncio.run(runtime.place(PLACED))
    location = runtime.weights_location()
    assert location.startswith("tcp://") == by_address
    assert location.endswith(f"@{HOME.address}:{PORT}" if by_address else "/shared/weights")


def test_what_the_trainers_node_holds_in_memory_goes_with_the_run(
    runtime_on: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "memory"
    monkeypatch.setattr(ray_runtime, "shared_folder", lambda _: shared)

    async def over(*, gone: bool) -> Any:
        runtime = runtime_on([HOME, FURTHER], "shared-memory")
        await runtime.place(PLACED)
        runtime._cluster.held_there, runtime._cluster.gone = shared, gone
        await runtime.close()
        await runtime.close()
        return runtime._cluster

    cluster = asyncio.run(over(gone=False))
    assert not shared.exists()
    assert cluster.asked == [(HOME, False)]  # once, and before the cluster was left
    assert asyncio.run(over(gone=True)).closed  # a node that is gone keeps nobody


@pytest.mark.parametrize("what", ["head", "raylet"])
def test_a_run_ends_with_one_line_when_nothing_can_be_started_any_more(
    runtime_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(ray_runtime, "LOOK_S", 0.01)
    monkeypatch.setattr(ray_runtime, "NODE_LOST_S", 0.05)
    servers: dict[str, asyncio.Server] = {}

    async def main() -> None:
        for name in ("head", "raylet"):
            servers[name] = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        ports = {name: one.sockets[0].getsockname()[1] for name, one in servers.items()}
        here = Node("n", "127.0.0.1", "here", {"CPU": 8.0}, {}, ports["raylet"])
        runtime = runtime_on([here])
        runtime._cluster.address = f"127.0.0.1:{ports['head']}"
        runtime._cluster.is_own = True
        runtime._ray = runtime._ray.model_copy(update={"head_lost_s": 0.05})
        lost: asyncio.Future[ClusterLost] = asyncio.get_running_loop().create_future()
        runtime.on_lost = lost.set_result
        watching = asyncio.create_task(runtime._watch_over([here]))
        servers[what].close()
        async with asyncio.timeout(scaled(60)):
            error = await lost
            await watching
        assert what in str(error)
        assert f"is gone; progress is kept; continue with: rollart run --resume {tmp}" in str(error)
        assert runtime._cluster.lost
        for server in servers.values():
            server.close()

    tmp = runtime_on([HOME]).run_dir
    asyncio.run(main())


def test_a_process_that_was_held_up_does_not_take_its_cluster_for_lost(
    runtime_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []

    async def reached(host: str, port: int) -> bool:
        """Reach nothing once, after an hour of standstill; then four times; then nothing."""
        looks.append(len(looks) in range(1, 5))
        if len(looks) == 1:
            clock.held_up_s = 3600.0
        return looks[-1]

    async def main() -> ClusterLost:
        runtime = runtime_on([HOME])
        runtime._cluster.address = "127.0.0.1:1"
        lost: asyncio.Future[ClusterLost] = asyncio.get_running_loop().create_future()
        runtime.on_lost = lost.set_result
        await runtime._watch_over([HOME])
        assert runtime._ray.head_lost_s == 15
        return await lost

    clock = HeldUpLoop()
    monkeypatch.setattr(ray_runtime, "_reached", reached)
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        assert "is gone" in str(runner.run(main()))
    assert looks == [False] + 4 * [True] + 15 * [False]


def test_what_listens_is_reached_by_a_loop_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "LOOK_S", 0.01)

    async def main() -> bool:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        attempt = asyncio.create_task(ray_runtime._reached("127.0.0.1", port))
        await asyncio.sleep(0)
        time.sleep(0.2)  # far longer than the attempt may take
        reached = await attempt
        server.close()
        return reached

    assert asyncio.run(main())


def test_an_engine_takes_the_smallest_number_that_is_free(runtime_on: Callable[..., Any]) -> None:
    runtime = runtime_on([HOME])
    first, other = object(), object()

    def number(index: int, plugin: object = first) -> int:
        found: int = runtime._number(index, plugin)
        return found

    assert [number(0), number(1), number(2, other)] == [0, 1, 0]
    asyncio.run(runtime.release_reservation("env", 1))  # an env worker of that number is no engine
    assert number(3) == 2
    asyncio.run(runtime.release_reservation("engine", 1))
    assert [number(4), number(5, other), number(6)] == [1, 1, 3]
