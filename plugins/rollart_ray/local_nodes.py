"""A Ray cluster of several nodes on this machine: for tests and benchmarks.

Takes: what resources each node has. Gives: an address, and nodes that can be killed. Never: opens a
port to other machines, runs without a token, or leaves a process or a file behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollart_ray import local as ray_local
from rollart_ray.cluster import read_token_anew

CPUS_PER_NODE = 2
STORE_BYTES = 80 << 20
HEALTH_CHECK_S = 0.5
"""Between two looks: a node that was killed refuses the connection, and is soon dead."""
HEALTH_ANSWER_S = 60.0
"""A node that lives may take this long to answer a look: all of them share one machine."""


class LocalNodes:
    """The cluster, while it is up."""

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
        """Kill the process of the head that knows the cluster."""
        self._has_head = False
        for info in self._cluster.head_node.all_processes["gcs_server"]:
            os.kill(info.process.pid, signal.SIGKILL)
            info.process.wait()

    def end(self) -> None:
        """End what is left; without the head no node could be asked to end itself."""
        for node in reversed(self._cluster.list_all_nodes()):
            with contextlib.suppress(Exception):  # what of it a test has killed already
                self._cluster.remove_node(node, allow_graceful=self._has_head)


@contextmanager
def local_nodes(nodes: Sequence[Mapping[str, float]]) -> Iterator[LocalNodes]:
    """Have a cluster; its token is in this process's environment meanwhile.

    Args:
        nodes: The resources of each, the head first.
    """
    folder = ray_local.LocalFolder()
    try:
        (folder.path / "ray").mkdir()
        with ray_local.variables({**folder.environment(), "RAY_TMPDIR": str(folder.path)}):
            from ray.cluster_utils import Cluster

            read_token_anew()
            settings = {
                **ray_local.health_settings(HEALTH_CHECK_S),
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
