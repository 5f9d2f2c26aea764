"""Options of the sandboxes. Never imports torch."""

from __future__ import annotations

from shutil import which
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollart_core.config.base import MOST, MOST_BYTES, Bytes, Positive, PositiveInt, Seconds
from rollart_sandboxes import network

_MIB = 1 << 20

AGENT_BYTES = 32 * _MIB
"""Memory that no folder of a box may fill: a box full of files could not even remove them."""


class SandboxConfig(BaseModel):
    """What every box can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttl_s: Seconds = 3600.0
    """Seconds a box may live; then it takes itself down."""
    output_bytes: Annotated[int, Field(ge=1, le=16 * _MIB)] = 4 * _MIB
    """Most bytes of stdout, and as many of stderr, that one command may give back."""
    file_bytes: Bytes = 256 * _MIB
    """Largest file that can be read from the box."""
    start_timeout_s: Seconds = 30.0
    """Seconds a box may take to start."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""


class SandboxLeaseConfig(SandboxConfig):
    """What every box without a network can be told."""

    network: list[str] = []
    """Hosts that can be reached, through a proxy: `pypi.org`, `*.pypi.org`, `pypi.org:8443`."""

    @field_validator("network")
    @classmethod
    def _are_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            network.rule(name)
        return names


def folder_bytes(wanted: int, memory_bytes: int) -> int:
    """Return the size of a folder that is memory: what is wanted, or what the box's memory allows.

    Args:
        wanted: Size asked for.
        memory_bytes: Most memory of the whole box, the folder included.
    """
    return min(wanted, memory_bytes - AGENT_BYTES)


class ProcessConfig(SandboxConfig):
    """Options of ``rollart/Process-v1``."""

    trusted: bool = False
    """Has to be true: there is no wall, so the code must be trusted."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] | None = None
    """Most address space of each process."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Most open files of each process."""


class BubblewrapConfig(SandboxLeaseConfig):
    """Options of ``rollart/Bubblewrap-v1``."""

    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] = 2048 * _MIB
    """Most memory of the box: in all, with a cgroup; of each process's address space, without."""
    cpus: Positive | None = None
    """Processor seconds a second; needs a cgroup that can be written."""
    num_pids: Annotated[int, Field(ge=8, le=MOST)] = 256
    """Most processes and threads at once."""
    disk_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 512 * _MIB
    """Size of the working folder. It is memory: at most `memory_bytes` less 32 MiB."""
    tmp_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 128 * _MIB
    """Size of ``/tmp``, and of ``/dev/shm``."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Most open files of each process."""
    rootfs: str = "/"
    """Folder whose system folders (``/usr``, ...) are the box's, read-only."""
    ro_binds: list[str] = []
    """More folders or files of the host that can be read in the box, at the same path."""
    python: str = "/usr/bin/python3"
    """Python 3.8 or newer, as a path in the box, that runs the agent."""
    host_uid: PositiveInt = 65534
    """Who the box is on the host, where the run itself is root's."""
    cgroup: bool = True
    """Whether to use a cgroup where one can be written."""

    def missing(self) -> dict[str, str]:
        """Return what a box needs and this machine has not."""
        if which("bwrap") is None:
            return {"id": "bwrap is not installed: install the package bubblewrap"}
        return {}


class DockerConfig(SandboxLeaseConfig):
    """Options of ``rollart/Docker-v1``."""

    image: str = "python:3.11-slim"
    """What is in the box; it must have Python 3.8 or newer."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that is not on the machine is fetched."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB, le=MOST_BYTES)] = 2048 * _MIB
    """Most memory of the box in all, what lies in its folders included."""
    cpus: Annotated[float, Field(ge=0.01, le=MOST)] | None = None
    """Processor seconds a second."""
    num_pids: Annotated[int, Field(ge=8, le=MOST)] = 256
    """Most processes and threads at once."""
    disk_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 512 * _MIB
    """Size of the working folder, which is memory (at most `memory_bytes` less 32 MiB); and of a
    writable root, where that can be."""
    tmp_bytes: Annotated[int, Field(ge=_MIB, le=MOST_BYTES)] = 128 * _MIB
    """Size of `/tmp`, and of `/dev/shm`."""
    num_open_files: Annotated[int, Field(ge=32, le=MOST)] = 1024
    """Most open files of each process."""
    ro_binds: list[str] = []
    """Folders or files of the host that can be read in the box, at the same path."""
    writable_root: bool = False
    """Whether all of the image's files can be changed, not only `/work`, `/tmp` and `/dev/shm`."""
    snapshot_paths: list[str] = []
    """More folders that a snapshot covers, such as `/testbed`, of a writable root."""
    user: Annotated[str, Field(pattern=r"^\d+:\d+$")] = "1000:1000"
    """Who commands are, as uid:gid. `0:0` is root in the box, without any capability."""
    python: str = "python3"
    """The Python that runs the agent: a path in the box, or a name on the image's PATH."""
    runtime: str | None = None
    """Runtime of the engine, such as `runsc` (gVisor); the engine's default if none."""
    host: str = ""
    """Address of the engine; `DOCKER_HOST`, or else the usual socket, if none."""

    def missing(self) -> dict[str, str]:
        """Return the engine or the image that is not there."""
        from rollart_sandboxes.docker_host import fault

        return fault(self)
