"""A Ray cluster on this machine only: its folder, its token, its environment.

A run's own cluster has one node. Tests and benchmarks use several nodes (:func:`local_nodes`),
which can be killed.

Takes: for several nodes, the resources of each. Gives: the settings to start Ray, and a folder for
its files. Never: opens a port to other machines, runs without a token, or leaves its folder or a
process behind (the next run removes the folder of a killed run).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

_PREFIX = "rollart-ray-"
OBJECT_STORE_BYTES = 256 << 20
"""Batches are the largest objects in it: weights use separate channels."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As on macOS and Windows: Ray keeps the loopback address, and does not replace it."""
_NICENESS = "RAY_worker_niceness"
HEALTH_LOOKS = 3
"""The number of missed health checks after which a node is dead."""


class LocalFolder:
    """The folder of one local cluster: private, with a short path, because it has sockets."""

    def __init__(self) -> None:
        root = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        remove_orphans(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        self.token = self.path / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32), encoding="ascii")

    @property
    def temp_dir(self) -> str:
        """Ray's folder for logs and sockets (Ray makes it readable for all users)."""
        return str(self.path / "r")

    def environment(self) -> dict[str, str]:
        """Return the variables that Ray's processes and this one need."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            **LOOPBACK,
            "RAY_USAGE_STATS_ENABLED": "0",
            # There is no dashboard to read them, and a process that has lost a node or the head
            # waits half a minute at its end to send them.
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
            # By default actors have a low priority, but the run waits for ours.
            _NICENESS: os.environ.get(_NICENESS, "0"),
        }

    def remove(self) -> None:
        """Remove it with all files of Ray."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_orphans(root: Path) -> None:
    """Remove the folders of clusters whose run is gone; Ray's processes ended with it."""
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError, PermissionError):
            pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


def health_settings(health_check_s: float | None) -> dict[str, int]:
    """Return Ray's health check settings; empty means Ray's defaults."""
    if health_check_s is None:
        return {}
    every_ms = max(1, round(health_check_s * 1000))
    return {
        "health_check_initial_delay_ms": every_ms,
        "health_check_period_ms": every_ms,
        "health_check_timeout_ms": every_ms,
        "health_check_failure_threshold": HEALTH_LOOKS,
    }


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables temporarily."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def read_token_anew() -> None:
    """Reload the token from the environment: Ray reads it only once per process."""
    with contextlib.suppress(ImportError, AttributeError):  # a private attribute of Ray
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


CPUS_PER_NODE = 2
STORE_BYTES = 80 << 20
HEALTH_CHECK_S = 0.5
"""Interval of health checks; a killed node refuses the connection, and is dead soon."""
HEALTH_ANSWER_S = 60.0
"""Time limit of a health check: all nodes share one machine."""


class LocalNodes:
    """A running cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._has_head = True

    @property
    def address(self) -> str:
        """The head's ``host:port``."""
        return str(self._cluster.address)

    def add(self, resources: Mapping[str, float]) -> Any:
        """Start one more node, and return it."""
        return self._cluster.add_node(**_node(resources))

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once, as when its machine loses power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Kill the head's process that has the state of the cluster (GCS)."""
        self._has_head = False
        for info in self._cluster.head_node.all_processes["gcs_server"]:
            os.kill(info.process.pid, signal.SIGKILL)
            info.process.wait()

    def end(self) -> None:
        """Kill all remaining processes; without the head no node can stop on request."""
        for node in reversed(self._cluster.list_all_nodes()):
            with contextlib.suppress(Exception):  # a test may have killed it already
                self._cluster.remove_node(node, allow_graceful=self._has_head)


@contextmanager
def local_nodes(nodes: Sequence[Mapping[str, float]]) -> Iterator[LocalNodes]:
    """Start a cluster; its token is in this process's environment meanwhile.

    Args:
        nodes: The resources of each, the head first.
    """
    folder = LocalFolder()
    try:
        (folder.path / "ray").mkdir()
        with variables({**folder.environment(), "RAY_TMPDIR": str(folder.path)}):
            from ray.cluster_utils import Cluster

            read_token_anew()
            settings = {
                **health_settings(HEALTH_CHECK_S),
                "health_check_timeout_ms": round(HEALTH_ANSWER_S * 1000),
            }
            head = {**_node(nodes[0]), "include_dashboard": False, "_system_config": settings}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            several = LocalNodes(cluster)
            try:
                for resources in nodes[1:]:
                    several.add(resources)
                cluster.wait_for_nodes()
                yield several
            finally:
                several.end()
    finally:
        read_token_anew()
        folder.remove()


def _node(resources: Mapping[str, float]) -> dict[str, Any]:
    rest = dict(resources)
    num_cpus = int(rest.pop("CPU", CPUS_PER_NODE))
    return {"num_cpus": num_cpus, "resources": rest, "object_store_memory": STORE_BYTES}
