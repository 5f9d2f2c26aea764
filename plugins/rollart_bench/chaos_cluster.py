"""A Ray cluster of several nodes on this machine, each of which can be killed as a whole.

    head: no devices, where the driver connects    node: devices of one kind, with its own processes

Takes: the mark of a benchmark, and a folder. Gives: an address, and nodes that start and stop.
Never: imports ray (its command line starts the nodes), or leaves a process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollart_bench.chaos_victims import MARK_VARIABLE, with_variable
from rollart_core.errors import RollartError
from rollart_plugins.engines.server_process import free_port

NODE_VARIABLE = "ROLLART_CHAOS_NODE"
"""A variable in the environment of every process of one node."""
HEALTH_CHECK_S = 0.5
UP_WITHIN_S = 240.0
STORE_BYTES = 80 << 20
_UP = b"Ray runtime started"
"""The output of `ray start` when the head has registered the node."""
_RAY = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"


@dataclass(slots=True)
class LocalCluster:
    """A cluster whose nodes are groups of processes on this machine.

    Args:
        mark: The mark of the benchmark.
        folder: Ray's files. A short path, because socket paths are limited in length.
    """

    mark: str
    folder: Path
    address: str = ""
    nodes: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Name -> resources."""
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name -> additional environment variables."""
    killed: set[str] = field(default_factory=set)
    num_started: int = 0
    commands: dict[str, list[str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start the head.

        Raises:
            RollartError: If it does not start.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "token").write_text(secrets.token_hex(32), encoding="ascii")
        (self.folder / "token").chmod(0o600)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        head = [f"--port={port}", "--head", f"--temp-dir={self.folder}/r"]
        head += ["--include-dashboard=false", "--num-cpus=0"]
        self._ray("head", [*head, "--node-ip-address=127.0.0.1"])
        self.wait_for("head")

    def add(
        self,
        name: str,
        resources: Mapping[str, float],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node; ``variables`` are added to this process's environment."""
        self.num_started += 1
        self.nodes[name], self.variables[name] = resources, dict(variables or {})
        more = ["--num-cpus=4", f"--resources={json.dumps(dict(resources))}"]
        self._ray(name, [f"--address={self.address}", *more, "--node-ip-address=127.0.0.1"])

    def wait_for(self, *names: str) -> None:
        """Wait until nodes have joined.

        Raises:
            RollartError: If one does not start.
        """
        until = time.monotonic() + UP_WITHIN_S
        for name in names:
            log = self.folder / f"{name}.log"
            while _UP not in log.read_bytes():
                if self.processes[name].poll() is not None and time.monotonic() < until:
                    self._end(name)  # its remaining processes: Ray gives a node 30 s to start
                    self._ray(name, self.commands[name])
                if time.monotonic() > until:
                    said = log.read_text(encoding="utf-8", errors="replace").split("\n")
                    tail = " / ".join(line.strip() for line in said if line.strip())[-400:]
                    raise RollartError(f"the Ray node {name} did not start: {tail}")
                time.sleep(0.1)

    def bring_back(self) -> None:
        """Start a replacement for each killed node, with the same resources."""
        for name in [n for n in self.nodes if n in self.killed]:
            fresh = f"{name.partition('-')[0]}-{self.num_started}"
            self.add(fresh, self.nodes.pop(name), self.variables.pop(name))
            self.wait_for(fresh)

    def kill(self, name: str) -> None:
        """Kill all processes of a node."""
        self.killed.add(name)
        self._end(name)

    def _end(self, name: str) -> None:
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, name: str) -> list[int]:
        """Return the processes of a node."""
        return with_variable(NODE_VARIABLE, f"{self.mark}-{name}")

    def close(self) -> None:
        """End all nodes, and everything else with the mark. No run may use them any more.

        Ray's agents overwrite their environment with their title, so some have lost a variable.
        """
        while left := self._all_pids():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.processes.values():
            process.wait()

    def _all_pids(self) -> set[int]:
        marked = with_variable(MARK_VARIABLE, self.mark)
        return {*marked, *(pid for name in self.processes for pid in self.pids(name))}

    def environment(self) -> dict[str, str]:
        """Return the environment variables that Ray's processes and the driver need."""
        every_ms = str(round(HEALTH_CHECK_S * 1000))
        return {
            **os.environ,
            MARK_VARIABLE: self.mark,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A run waits for its actors, so they must not have a lower priority.
            "RAY_worker_niceness": "0",
            # A node that starts on a busy machine responds slowly at first.
            "RAY_health_check_initial_delay_ms": "10000",
            "RAY_health_check_period_ms": every_ms,
            "RAY_health_check_timeout_ms": every_ms,
            "RAY_health_check_failure_threshold": "4",
        }

    def _ray(self, name: str, arguments: list[str]) -> None:
        own = self.variables.get(name, {})
        environment = {**self.environment(), **own, NODE_VARIABLE: f"{self.mark}-{name}"}
        command = [sys.executable, "-c", _RAY, "start", "--block", *arguments]
        store = f"--object-store-memory={STORE_BYTES}"
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, store],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
            )
        self.commands[name], self.processes[name] = arguments, process
