"""Options of the sandboxes. This module never imports torch."""

from __future__ import annotations

from shutil import which
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollart_core.config.base import MOST, MOST_BYTES, Bytes, Positive, PositiveInt, Seconds
from rollart_sandboxes import network

_MIB = 1 << 20

AGENT_BYTES = 32 * _MIB
"""Memory that files cannot use: in a sandbox full of files, even removing them would fail."""


class SandboxConfig(BaseModel):
    """Options of all sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttl_s: Seconds = 3600.0
    """Maximum lifetime of a sandbox in seconds. After this time it stops itself."""
    output_bytes: Annotated[int, Field(ge=1, le=16 * _MIB)] = 4 * _MIB
    """Maximum bytes of stdout, and the same for stderr, that one command can return."""
    file_bytes: Bytes = 256 * _MIB
    """Maximum size of a file that can be read from the sandbox."""
    start_timeout_s: Seconds = 30.0
    """Maximum seconds that the start of a sandbox can take."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""


class SandboxLeaseConfig(SandboxConfig):
    """Options of all sandboxes without a network."""

    network: list[str] = []
    """Allowed hosts, through a proxy: `pypi.org`, `*.pypi.org`, `pypi.org:8443`."""

    @field_validator("network")
    @classmethod
    def _are_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            network.rule(name)
        return names


def folder_bytes(wanted: int, memory_bytes: int) -> int:
    """Return the size of an in-memory folder: the wanted size, or less if memory does not allow it.

    Args:
        wanted: The configured size.
        memory_bytes: Maximum memory of the whole sandbox, including the folder.
    """
    return min(wanted, memory_bytes - AGENT_BYTES)


class ProcessConfig(SandboxConfig):
    """Options of ``rollart/Process-v1``."""

    trusted: bool = False
    """Must be true: this sandbox does not isolate, so you must trust the code."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] | None = None
    """Maximum address space of each process."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Maximum open files of each process."""


class BubblewrapConfig(SandboxLeaseConfig):
    """Options of ``rollart/Bubblewrap-v1``."""

    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] = 2048 * _MIB
    """Maximum memory: of the whole sandbox with a cgroup, else of each process's address space."""
    cpus: Positive | None = None
    """CPU limit, in cores. It needs a writable cgroup."""
    num_pids: Annotated[int, Field(ge=8, le=MOST)] = 256
    """Maximum number of processes and threads."""
    disk_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 512 * _MIB
    """Size of the working folder. It is in memory: at most `memory_bytes` minus 32 MiB."""
    tmp_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 128 * _MIB
    """Size of ``/tmp``, and of ``/dev/shm``."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Maximum open files of each process."""
    rootfs: str = "/"
    """Folder on the host whose system folders (``/usr``, ...) the sandbox sees, read-only."""
    ro_binds: list[str] = []
    """More folders or files of the host that the sandbox can read, at the same path."""
    python: str = "/usr/bin/python3"
    """Path in the sandbox of the Python that runs the agent, version 3.8 or newer."""
    host_uid: PositiveInt = 65534
    """User id of the sandbox on the host, if root starts the run."""
    cgroup: bool = True
    """Use a cgroup if one is writable."""

    def missing(self) -> dict[str, str]:
        """Return what a sandbox needs and this machine does not have."""
        if which("bwrap") is None:
            return {"id": "bwrap is not installed: install the package bubblewrap"}
        return {}


class DockerConfig(SandboxLeaseConfig):
    """Options of ``rollart/Docker-v1``."""

    image: str = "python:3.11-slim"
    """Image of the sandbox. It must contain Python 3.8 or newer."""
    pull: Literal["missing", "never"] = "missing"
    """Pull an image that is not on the machine, or never pull."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] = 2048 * _MIB
    """Maximum memory of the sandbox, including its in-memory folders."""
    cpus: Annotated[float, Field(ge=0.01, le=MOST)] | None = None
    """CPU limit, in cores."""
    num_pids: Annotated[int, Field(ge=8, le=MOST)] = 256
    """Maximum number of processes and threads."""
    disk_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 512 * _MIB
    """Size of the working folder, which is in memory (at most `memory_bytes` minus 32 MiB). Also
    limits the size of a writable root, if the storage driver supports it."""
    tmp_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 128 * _MIB
    """Size of `/tmp`, and of `/dev/shm`."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Maximum open files of each process."""
    ro_binds: list[str] = []
    """Folders or files of the host that the sandbox can read, at the same path."""
    writable_root: bool = False
    """Make all files of the image writable, not only `/work`, `/tmp` and `/dev/shm`."""
    snapshot_paths: list[str] = []
    """More folders that a snapshot includes, such as `/testbed`. For a writable root."""
    user: Annotated[str, Field(pattern=r"^\d+:\d+$")] = "1000:1000"
    """User of the commands, as uid:gid. `0:0` is root in the sandbox, without any capability."""
    python: str = "python3"
    """The Python that runs the agent: a path in the sandbox, or a name on the image's PATH."""
    runtime: str | None = None
    """Runtime of the engine, such as `runsc` (gVisor). If not set, the engine's default."""
    host: str = ""
    """Address of the engine. If not set, `DOCKER_HOST`, or else the default socket."""

    def missing(self) -> dict[str, str]:
        """Return the engine or the image that is missing."""
        from rollart_sandboxes.docker_host import fault

        return fault(self)
