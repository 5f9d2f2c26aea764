"""The sandbox type ``docker``: a container of the Docker engine around the agent.

Takes: options. Gives: the Sandbox contract: the image read-only; a working folder, ``/tmp`` and
``/dev/shm`` in memory, each with a size limit; no network, no capabilities, no way to gain any; a
user that is not root. Never: runs a ``docker`` command, or leaves a container when this process is
killed: a sandbox ends with its stdin, and the engine removes containers that have ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rollart_core.contracts.host import Finding
from rollart_core.errors import SandboxFailure
from rollart_sandboxes import docker_host
from rollart_sandboxes.base import AgentSandbox
from rollart_sandboxes.cgroup import end_group, memory_used_bytes
from rollart_sandboxes.config import DockerConfig, SandboxConfig, folder_bytes
from rollart_sandboxes.connection import bootstrap
from rollart_sandboxes.container import Container, remove
from rollart_sandboxes.docker_host import PREFIX, TTL_LABEL
from rollart_sandboxes.engine import Engine, EngineError, unfit
from rollart_sandboxes.pool.owner import labels

WORK: Final = "/work"
_TMP: Final = "/tmp"
_SHM: Final = "/dev/shm"
_MISTAKES: Final = ("operation not permitted", "invalid argument")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DockerSandbox(AgentSandbox):
    """A sandbox that is a container; needs an engine and an image with Python."""

    config_class: ClassVar[type[SandboxConfig]] = DockerConfig
    trial: ClassVar[Mapping[str, object]] = {"pull": "never"}

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        assert isinstance(self._config, DockerConfig)
        self._options = self._config
        self.name = f"{PREFIX}{uuid.uuid4().hex}"
        """Name of its container."""
        self._about: dict[str, Any] = {}
        self._image_env: dict[str, str] = {}
        self._has_quota = False
        self._group: Path | None = None

    @property
    def enforced_by(self) -> dict[str, str]:
        """What enforces each limit: ``cgroup``, ``tmpfs`` or ``storage``; empty if nothing does.

        ``root_bytes`` is the maximum growth of a writable root. ``users`` shows how root in the
        sandbox maps to another user on the host: ``remap``, ``rootless``, or empty if it does not.
        """
        about = self._about
        return {
            "memory_bytes": "cgroup" if about.get("MemoryLimit") else "",
            "num_pids": "cgroup" if about.get("PidsLimit") else "",
            "cpus": "cgroup" if about.get("CpuCfsQuota") else "",
            "disk_bytes": "tmpfs",
            "root_bytes": self._root_held(),
            "users": docker_host.users(about),
        }

    @property
    def memory_used_bytes(self) -> int | None:
        """Memory that the sandbox uses now, from its cgroup; None on another machine."""
        return memory_used_bytes(self._group) if self._group else None

    def _root_held(self) -> str:
        if not self._options.writable_root:
            return "read-only"
        return "storage" if self._has_quota else ""

    async def _launch(self) -> Container:
        engine = Engine(self._options.host, timeout_s=self._options.start_timeout_s)
        self._about = await docker_host.about(engine)
        image = await docker_host.image(engine, self._options)
        env = image["Config"].get("Env") or []
        self._image_env = dict(entry.split("=", 1) for entry in env if "=" in entry)
        self.leaves("container", f"{engine.host} {self.name}")
        volumes = list(image["Config"].get("Volumes") or {})
        settings = self._settings(volumes)
        try:
            return await self._run(engine, settings)
        except EngineError as e:
            raise _mended(e, self._options, self._about) from e

    async def _run(self, engine: Engine, settings: dict[str, Any]) -> Container:
        timeout_s = self._options.start_timeout_s
        if self._options.writable_root:
            held = {**settings["HostConfig"], "StorageOpt": {"size": str(self._options.disk_bytes)}}
            try:
                container = await Container.run(
                    engine, self.name, {**settings, "HostConfig": held}, timeout_s=timeout_s
                )
            except EngineError as e:
                if "storage" not in e.said:  # only some storage drivers support a size limit
                    raise
            else:
                self._has_quota = True
                return container
        return await Container.run(engine, self.name, settings, timeout_s=timeout_s)

    def _settings(self, volumes: Sequence[str]) -> dict[str, Any]:
        """Return the request for the container, in the format of the Engine API."""
        options = self._options
        line = labels() if self.line is None else self.line.labels
        return {
            "Image": options.image,
            "Hostname": "box",
            "User": options.user,
            "WorkingDir": WORK,
            "Entrypoint": [options.python, "-I", "-S", "-c", bootstrap()],
            "Cmd": [],
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Labels": {**line, TTL_LABEL: f"{options.ttl_s:g}"},
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {**_host_config(options, volumes), **self._limits()},
        }

    def _limits(self) -> dict[str, Any]:
        options, held = self._options, self.enforced_by
        limits: dict[str, Any] = {
            "ShmSize": folder_bytes(options.tmp_bytes, options.memory_bytes),
            "Ulimits": [
                _ulimit("nofile", options.num_open_files),
                _ulimit("core", 0),
            ],
        }
        if held["memory_bytes"]:
            limits["Memory"] = options.memory_bytes
            if self._about.get("SwapLimit"):
                limits["MemorySwap"] = options.memory_bytes
        if held["num_pids"]:
            limits["PidsLimit"] = options.num_pids
        if held["cpus"] and options.cpus is not None:
            limits["NanoCpus"] = int(options.cpus * 1e9)
        return limits

    async def _launched(self) -> None:
        """Read the agent's process id on the host; it waits for its source: nothing has run yet."""
        assert isinstance(self._process, Container)
        try:
            await self._process.inspect()
        except EngineError as e:
            if e.status != 404:
                raise
            message = f"the container ended during its start{await super()._explain()}"
            raise unfit(f"{message}: {self._options.python} must be Python 3.8 or newer") from e
        self.agent_pid = self._process.pid
        self._group = self._process.group
        if self._group is not None:
            self.leaves("usage", str(self._group))

    async def _explain(self) -> str:
        """Return why the sandbox may be gone: the last output and the container's state."""
        said = await super()._explain()
        if not isinstance(self._process, Container):
            return said
        return f"{said}; {await self._process.state()}"

    def _hello(self) -> dict[str, Any]:
        options = self._options
        known = {"PATH": _PATH, "LANG": "C.UTF-8", "USER": "box", **self._image_env}
        return {
            "root": WORK,
            "more_roots": [_TMP, _SHM, *options.snapshot_paths],
            "env": {**known, **options.env},
        }

    @classmethod
    async def remove(cls, left: Mapping[str, Sequence[str]]) -> list[str]:
        """Remove containers that a killed process noted; return the errors."""
        faults = []
        for noted in left.get("container", ()):
            host, _, name = noted.rpartition(" ")
            if not name.startswith(PREFIX):
                faults.append(f"{noted} is not a container of RollArt")
                continue
            try:
                await remove(Engine(host), name)
            except EngineError as e:
                faults.append(f"container {name}: {e.said}")
            except SandboxFailure as e:
                # The engine removes stopped containers after its restart.
                groups = map(Path, left.get("usage", ()))
                if not all(end_group(group) for group in groups):
                    faults.append(f"container {name}: {e}")
        return faults

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove what dead processes left: snapshots, containers, and overdue containers."""
        return [*await super().sweep(), *await docker_host.sweep(Engine())]

    @classmethod
    async def examine(cls) -> list[Finding]:
        """Report the state of this machine's engine, its limits and its images."""
        return await docker_host.examine(DockerConfig().image)


def _host_config(options: DockerConfig, volumes: Sequence[str]) -> dict[str, Any]:
    """Return the isolation settings; the engine's default seccomp and AppArmor profiles apply."""
    uid, gid = options.user.split(":")
    own = f"uid={uid},gid={gid}"
    kinds = "rw,exec,nosuid,nodev"
    disk = folder_bytes(options.disk_bytes, options.memory_bytes)
    tmp = folder_bytes(options.tmp_bytes, options.memory_bytes)
    tmpfs = {
        WORK: f"{kinds},size={disk},mode=0755,{own}",
        _TMP: f"{kinds},size={tmp},mode=1777",
    }
    for path in volumes:  # otherwise it would be a folder on the host's disk, without a limit
        tmpfs.setdefault(path, f"{kinds},size={tmp},mode=0755,{own}")
    config: dict[str, Any] = {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Mounts": [_bind(path) for path in options.ro_binds],
        "NetworkMode": "none",
        "ReadonlyRootfs": not options.writable_root,
        "SecurityOpt": ["no-new-privileges"],
        "Tmpfs": tmpfs,
    }
    if options.runtime is not None:
        config["Runtime"] = options.runtime
    return config


def _bind(path: str) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": path,
        "Target": path,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def _mended(error: EngineError, options: DockerConfig, about: Mapping[str, Any]) -> SandboxFailure:
    """Return an error that explains how to fix what an engine refused."""
    said = error.said
    if "runtime" in said.lower() and options.runtime is not None and options.runtime in said:
        there = sorted(about.get("Runtimes") or {})
        return unfit(
            f"the Docker engine has no runtime {options.runtime!r}: install it and name it in the "
            f"engine's /etc/docker/daemon.json, or use one of {there}"
        )
    if "executable file not found" in said or "no such file or directory: unknown" in said:
        return unfit(
            f"the image {options.image} has no {options.python}: use an image with Python 3.8 or "
            "newer, or set the option python to its path"
        )
    if error.status == 400 or any(mistake in said for mistake in _MISTAKES):
        return unfit(str(error))
    return error
