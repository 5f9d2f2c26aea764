"""Runs over a Ray cluster of three unlike nodes on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pace import scaled, wait_until
from support.patient_ray import patient_ray
from support.ray_runs import (
    PLACEMENT_S,
    POOLS,
    TEST_PATHS,
    assert_none_left,
    gradients_of,
    small_run,
    weights_of,
)

from rollart_core.config.model import ModelPath
from rollart_core.config.runtime import RayRuntime
from rollart_core.errors import ConfigError, RollartError, WorkerDied
from rollart_core.runtime.launch import launch
from rollart_core.runtime.records import pack
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_plugins.doctor import examine
from rollart_ray import nodes as ray_nodes
from rollart_ray.cluster import RayCluster
from rollart_ray.local import LocalNodes, local_nodes
from rollart_ray.pools import ResourceSlot
from rollart_ray.worker import ActorSettings, RayWorker, RecordObject, Reservation
from rollart_testing import FakeEnv

TOKEN = "RAY_AUTH_TOKEN_PATH"
SECRET = "ROLLART_TEST_SECRET"
KEEPS_ALL = {"id": "grpo", "zero_advantage": "keep"}
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


class SharedCluster:
    """The cluster that the tests of this file share: started when one needs it."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._nodes: LocalNodes | None = None

    @property
    def nodes(self) -> LocalNodes:
        if self._nodes is None:
            # Without cores no worker is started before there is something for it to do.
            nodes = [{mark: 1.0, "CPU": 0.0} for mark in ("train_node", "gen_node", "env_node")]
            nodes[0]["train_node"] = 2.0
            self._open.enter_context(patient_ray())
            self._nodes = self._open.enter_context(local_nodes(nodes))
        return self._nodes

    def end(self) -> None:
        """End it; whoever needs it next gets another one."""
        self._nodes = None
        self._open.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedCluster]:
    cluster = SharedCluster()
    yield cluster
    cluster.end()


@pytest.fixture
def nodes(shared: SharedCluster) -> LocalNodes:
    return shared.nodes


@pytest.fixture
def on_ray(nodes: LocalNodes) -> dict[str, Any]:
    runtime = {"kind": "ray", "address": nodes.address, "placement_s": PLACEMENT_S}
    return {"runtime": runtime, "mapper": POOLS}


class Tried:
    """An object for a part to hold."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    def greet(self, whom: str) -> str:
        print("a word for the log", flush=True)
        return f"{self.greeting} {whom}"

    def total(self, records: list[dict[str, Any]], factor: int) -> tuple[int, bool]:
        rows = [record["row"] for record in records]
        return factor * sum(int(row.sum()) for row in rows), rows[0].flags.writeable

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def refuse(self) -> None:
        raise ConfigError("not so")

    def end(self) -> None:
        os._exit(3)


def joining(nodes: LocalNodes) -> RayRuntime:
    return RayRuntime(address=nodes.address, placement_s=PLACEMENT_S)


async def _part(cluster: RayCluster, log: Path) -> RayWorker:
    slot = ResourceSlot("engine", "gen_node", {"gen_node": 1.0}, {})
    group = await cluster.reserve([slot], "PACK")

    async def reserved() -> Reservation:
        return Reservation(slot, group, 0)

    settings = ActorSettings({"OMP_NUM_THREADS": "1"}, str(log), TEST_PATHS)
    return RayWorker("tried", cluster, reserved, settings)


def test_a_part_in_an_actor_is_as_a_part_in_a_process(nodes: LocalNodes, tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = RayCluster(joining(nodes), "tried", 1)
        cluster.open()
        try:
            part = await _part(cluster, tmp_path / "tried.log")
            await part.start("test_ray_run:Tried", {"greeting": "good day,"})
            deaths: list[object] = []
            part.on_death = deaths.append
            waiting = [asyncio.ensure_future(part.call("wait")) for _ in range(200)]
            assert await part.call("greet", "Ada") == "good day, Ada"  # none of them is in its way
            records = [{"row": np.arange(n)} for n in (1000, 3)]
            stored = RecordObject(cluster.put(pack(records)))
            of_both = [part.call("total", stored, 1), part.call("total", stored, 2)]
            assert await asyncio.gather(*of_both) == [(499_503, False), (999_006, False)]
            with pytest.raises(ConfigError, match="not so"):
                await part.call("refuse")
            with pytest.raises(WorkerDied, match=r"the tried actor is gone .*tried\.log"):
                await part.call("end")
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(a) for a in answers} == {WorkerDied}
            assert not part.alive
            assert deaths == [part]
            await part.close()
            assert (tmp_path / "tried.log").read_text().count("a word for the log") == 1
        finally:
            cluster.close()

    asyncio.run(scenario())


def test_a_killed_part_is_heard_of_once(nodes: LocalNodes, tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = RayCluster(joining(nodes), "killed", 1)
        cluster.open()
        try:
            part = await _part(cluster, tmp_path / "tried.log")
            await part.start()
            died = asyncio.Event()
            deaths: list[object] = []
            part.on_death = lambda dead: (deaths.append(dead), died.set())
            part.kill()
            async with asyncio.timeout(scaled(60)):
                await died.wait()
            await part.close()
            await part.close()
            assert deaths == [part]
        finally:
            cluster.close()

    asyncio.run(scenario())


def _assert_no_actor_is_left(token: str) -> None:
    """Assert that no process of a cluster's actors is left; a killed one takes a moment."""
    assert_none_left(f"RAY_AUTH_TOKEN_PATH={token}".encode(), named="ray::PartActor")


def _other_versions(names: list[str]) -> Callable[[], dict[str, str]]:
    wanted = list(names)

    def notify() -> dict[str, str]:
        return dict.fromkeys(["Python", *wanted], "0.0.1")

    return notify


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pools": [{"name": "big", "device": "H100", "count": 1}]},
            "pool 'big': no node of the cluster has GPU 1",
        ),
        (
            {"pools": [{"name": "train_node", "count": 5, "resources": {"train_node": 1}}]},
            "5 devices are requested, but the cluster has 2",
        ),
        ({"num_engines": 2}, r"pool 'gen_node' has 1 device\(s\), but the run places 2 workers"),
    ],
)
def test_what_the_cluster_has_not_is_said_before_anything_starts(
    on_ray: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    on_ray["runtime"] |= changes
    with pytest.raises(ConfigError, match=message):
        launch(small_run(tmp_path, **on_ray))
    _assert_no_actor_is_left(os.environ[TOKEN])


def test_what_a_node_lacks_is_said_with_its_name(
    on_ray: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "ask_versions", _other_versions)
        patch.setattr(ray_nodes, "versions", lambda names: {"rollart": "0.1.0"})
        with pytest.raises(ConfigError, match=r"node .* has rollart 0\.0\.1 \(here 0\.1\.0\)"):
            launch(small_run(tmp_path, **on_ray))
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "ask_whether_seen", lambda path, text: lambda: False)
        with pytest.raises(ConfigError, match=r"node .* does not see .*: set runs_dir to"):
            launch(small_run(tmp_path, **on_ray))
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "ask_to_write", lambda path, text: lambda: "read only")
        with pytest.raises(ConfigError, match=r"cannot write to /dev/shm.*: read only"):
            launch(small_run(tmp_path, **on_ray))


def _differs_on_the_engines_node(usual: Callable[[], Any], other: Any) -> Callable[[], Any]:
    """Return a question that one node of the cluster answers otherwise."""

    def answer() -> Any:
        import ray

        here = ray.get_runtime_context().get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
        return other if "gen_node" in node["Resources"] else usual()

    return answer


@pytest.mark.parametrize(
    ("question", "other", "message"),
    [
        ("ask_the_time", 1e9, r"the clock of node \S+ .*differs by at least .*: synchronize all"),
        ("ask_for_model", {}, r"node .* has no .*: put the model on a file system"),
        ("ask_for_model", {"config.json": "1"}, r"has another model .* \(\S+ differs\): copy one"),
    ],
)
def test_one_node_that_differs_stops_the_run_and_the_doctor_shows_it(
    on_ray: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    other: Any,
    message: str,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    usual = getattr(ray_nodes, question)
    ask = lambda *of: _differs_on_the_engines_node(usual(*of), other)  # noqa: E731
    monkeypatch.setattr(ray_nodes, question, ask)
    run = small_run(tmp_path / "runs", **on_ray)
    if question == "ask_for_model":
        path = ModelPath(path=str(tmp_path / "model"))
        run = replace(run, config=run.config.model_copy(update={"model": path}))
    with pytest.raises(ConfigError, match=message):
        launch(run)
    found = asyncio.run(examine(run, print))
    first, *others = found
    assert first.finding.what == "preflight checks"
    assert re.search(message, first.finding.says)
    assert len({one.node for one in others if one.finding.what == "open files"}) == 3
    _assert_no_actor_is_left(os.environ[TOKEN])


def test_the_doctor_asks_every_node_and_all_ranks_sum(
    on_ray: dict[str, Any], tmp_path: Path
) -> None:
    on_ray["runtime"] |= {"num_trainer_ranks": 2}
    found = asyncio.run(examine(small_run(tmp_path, **on_ray), print))
    assert [one for one in found if one.finding.state == "bad"] == []
    assert len({one.node for one in found if one.finding.what == "disk"}) == 3
    assert found[-1].finding.what == "all-reduce of 2 ranks"
    assert found[-1].finding.says.startswith("16 MiB in ")
    _assert_no_actor_is_left(os.environ[TOKEN])
    assert list(tmp_path.iterdir()) == []


def test_all_that_cluster_and_nodes_lack_is_one_error(
    on_ray: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "ask_versions", _other_versions)
        patch.setattr(ray_nodes, "versions", lambda names: {"rollart": "0.1.0"})
        wrong = {"pools": [{"name": "big", "device": "H100", "count": 1}]}
        with pytest.raises(ConfigError) as told:
            launch(small_run(tmp_path, runtime=on_ray["runtime"] | wrong, mapper="static"))
    lines = str(told.value).splitlines()
    assert sum("has rollart 0.0.1 (here 0.1.0)" in line for line in lines) == 3
    assert sum("pool 'big': no node of the cluster has GPU 1" in line for line in lines) == 1
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "ask_whether_seen", lambda path, text: lambda: False)
        patch.setattr(ray_nodes, "ask_to_write", lambda path, text: lambda: "read only")
        patch.setattr(ray_nodes, "check_what_is_missing", lambda *of: lambda: ["command: not here"])
        with pytest.raises(ConfigError) as told:
            launch(small_run(tmp_path, **on_ray))
    assert ": engine rollart/Embedded-v1: command: not here" in str(told.value)
    assert "set runs_dir to" in str(told.value)
    assert "cannot write to /dev/shm" in str(told.value)


def test_no_cluster_there(tmp_path: Path) -> None:
    runtime = {"kind": "ray", "address": "127.0.0.1:9"}
    with pytest.raises(ConfigError, match=r"no Ray cluster to join at 127.0.0.1:9"):
        launch(small_run(tmp_path, runtime=runtime))


class _KillsANode(NobodyWatches):
    """Kills a node in the midst of training, and holds the run until the cluster knows of it."""

    def __init__(self, kill: Callable[[], None], is_known: Callable[[], bool]) -> None:
        self._kill, self._is_known = kill, is_known
        self.has_killed = False

    def progress(self, fraction: float | None, line: Mapping[str, Any]) -> None:
        if not self.has_killed and line.get("batch", 0) >= 2:
            self._kill()
            wait_until(self._is_known, "the end of the node")
            self.has_killed = True


def _num_alive() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def test_a_deterministic_run_that_loses_a_node_ends_with_the_same_weights_as_inline(
    nodes: LocalNodes,
    on_ray: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    more = nodes.add({"gen_node": 1.0, "env_node": 1.0, "CPU": 0.0})  # one engine, one env worker
    on_ray["runtime"] |= {"num_env_workers": 2, "num_engines": 2}
    printed = []

    def kill() -> None:
        printed.append(capfd.readouterr().out)  # Ray itself prints that a node is gone
        nodes.kill(more)

    watcher = _KillsANode(kill, lambda: _num_alive() == 3)
    failures = {"max_rate": 0.9, "max_restarts": 1, "hang_s": scaled(300)}
    capfd.readouterr()
    over = launch(small_run(tmp_path / "ray", failures=failures, **on_ray), observer=watcher)
    assert watcher.has_killed
    assert printed == [""]  # stdout is for --json alone
    inline = launch(small_run(tmp_path / "inline"))
    assert (over.stop_reason, over.batches) == (inline.stop_reason, inline.batches) == ("done", 5)
    assert gradients_of(over.run_dir) == gradients_of(inline.run_dir)
    assert any(gradients_of(over.run_dir))  # or there was nothing to learn
    assert weights_of(over.run_dir) == weights_of(inline.run_dir)
    with JournalReader(Path(over.run_dir)) as journal:
        died = {json.loads(e.payload)["part"] for e in journal.events() if e.kind == "part_died"}
    assert "env" in died
    assert died & {"engine", "engine-1"}
    assert over.placement["trainer"] == "train_node"
    logs = {path.name for path in (Path(over.run_dir) / "logs").iterdir()}
    assert {"engine.log", "engine-1.log", "trainer.log", "env.log"} <= logs
    assert not list(Path("/dev/shm").glob(f"rollart-run-*{Path(over.run_dir).name}"))
    _assert_no_actor_is_left(os.environ[TOKEN])


class KeyedEnv(FakeEnv):
    """Plays only in a process that has the variable ``SECRET``."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self._digest = digest

    def reset(self, **given: Any) -> Any:
        assert hashlib.sha256(os.environ.get(SECRET, "").encode()).hexdigest() == self._digest
        return super().reset(**given)


def test_a_secret_reaches_workers_and_no_file(
    on_ray: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes run already and do not have it; of Ray's logs and of the run, nothing names it."""
    on_ray["runtime"]["env_vars"] = [SECRET]
    value = secrets.token_hex(16)
    env = {
        "id": "test_ray_run:KeyedEnv",
        "digest": hashlib.sha256(value.encode()).hexdigest(),
    }
    run = small_run(tmp_path, env=env, warm_start=None, stop={"batches": 1}, **on_ray)
    with pytest.raises(ConfigError, match=f"runtime.env_vars: .* {SECRET} is not set here"):
        launch(run)
    monkeypatch.setenv(SECRET, value)
    report = launch(run)
    assert (report.ok, report.failures) == (True, {})
    folders = [*Path("/tmp").glob(f"rollart-ray-{os.getpid()}-*"), tmp_path]
    assert len(folders) == 2
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    logs = [path.name for path in files]
    assert {"journal.db", "config.yaml", "env.log", "gcs_server.out"} <= set(logs)
    files += Path("/proc").glob("[0-9]*/cmdline")
    assert not [path for path in files if value.encode() in _content(path)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # of a process that has ended
        return b""


def test_programs_on_other_nodes_ask_the_gateway(on_ray: dict[str, Any], tmp_path: Path) -> None:
    agent = {"id": "rollart_testing.agents:FakeAgent", "turns": 2, "tasks": 8}
    rollout = {"groups_per_batch": 2, "group_size": 2, "max_new_tokens": 4, "max_turns": 3}
    few = {"stop": {"batches": 2}, "algorithm": KEEPS_ALL}
    changes = {**on_ray, **few, "env": agent, "rollout": rollout, "warm_start": None}
    report = launch(small_run(tmp_path, **changes))
    assert report.ok
    found = [t for t in read_trajectories(Path(report.run_dir)) if t.failure is None]
    assert len(found) >= 8
    assert {len(t.turns) for t in found} == {2}


def test_a_cluster_that_goes_away_stops_the_run_with_a_reason(
    shared: SharedCluster, on_ray: dict[str, Any], tmp_path: Path
) -> None:
    on_ray["runtime"] |= {"head_lost_s": 3}
    changes = {"stop": {"batches": 100_000}, "warm_start": None, "algorithm": KEEPS_ALL}
    watcher = _KillsANode(shared.nodes.kill_head, lambda: True)
    try:
        with pytest.raises(RollartError, match=r"the head of the Ray cluster .* --resume") as e:
            launch(small_run(tmp_path, **on_ray, **changes), observer=watcher)
        token = os.environ[TOKEN]
    finally:
        shared.end()
    assert not isinstance(e.value, ConfigError)
    run_dir = next(tmp_path.iterdir())
    assert (run_dir / "journal.db").exists()
    _assert_no_actor_is_left(token)
