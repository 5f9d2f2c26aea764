"""The peer of `rollart bench sandbox`: a container in which each command is a `docker exec`.

Takes: an image. Gives: seconds of one command by the ``docker`` program and by the engine's API:
create, start and inspect, as Docker's own client libraries do it. Never: leaves the container.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart_core.errors import UserError

COMMAND = ["true"]


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=60)
        self._path = path

    def connect(self) -> None:
        """Connect to the engine."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


class DockerExec:
    """One running container.

    Args:
        image: What is in it.

    Raises:
        UserError: When there is no engine, or it does not have the image.
    """

    def __init__(self, image: str) -> None:
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._socket = host.removeprefix("unix://")
        self._name = f"rollart-bench-{uuid.uuid4().hex}"
        if not Path(self._socket).exists():
            raise UserError(f"no Docker engine at {host}")
        self._ask(
            "POST",
            f"/containers/create?name={self._name}",
            {
                "Image": image,
                "Entrypoint": ["sleep", "3600"],
                "HostConfig": {"NetworkMode": "none", "AutoRemove": True},
            },
        )
        try:
            self._ask("POST", f"/containers/{self._name}/start")
        except BaseException:
            self.close()
            raise

    def ways(self) -> dict[str, Callable[[], float]]:
        """Return what runs a command and gives the milliseconds it took, by the peer's name."""
        found = {"docker exec, by API": self.by_api}
        if shutil.which("docker"):
            found["docker exec, by CLI"] = self.by_cli
        return found

    def by_cli(self) -> float:
        """Run a command with the ``docker`` program."""
        began = time.perf_counter()
        subprocess.run(["docker", "exec", self._name, *COMMAND], check=True, capture_output=True)
        return (time.perf_counter() - began) * 1e3

    def by_api(self) -> float:
        """Run a command, read its output and learn its exit code, with three requests."""
        began = time.perf_counter()
        asked = {"Cmd": COMMAND, "AttachStdout": True, "AttachStderr": True}
        made = self._ask("POST", f"/containers/{self._name}/exec", asked)
        self._ask("POST", f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        if self._ask("GET", f"/exec/{made['Id']}/json")["ExitCode"] != 0:
            raise UserError("docker exec of `true` failed")
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Remove the container."""
        self._ask("DELETE", f"/containers/{self._name}?force=1")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = _Connection(self._socket)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        except OSError as e:
            raise UserError(f"the Docker engine at {self._socket} does not answer: {e}") from e
        finally:
            connection.close()
        if answer.status >= 300 and not (method == "DELETE" and answer.status in (404, 409)):
            raise UserError(f"the Docker engine says: {said.decode(errors='replace').strip()}")
        return json.loads(said) if said[:1] == b"{" else None
