"""The light wall: namespaces around the agent, made by bubblewrap, without a daemon or an image.

Takes: options. Gives: the Sandbox contract: system folders read-only; a working folder, ``/tmp``
and ``/dev/shm`` in memory, each of a size; no network, no capabilities, no way to gain any; and a
filter of system calls.
Never: runs as root on the host, or shows the host's processes, homes or temporary files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from rollart_core.contracts.host import Finding
from rollart_core.errors import SandboxFailure
from rollart_sandboxes import bubblewrap_host, seccomp
from rollart_sandboxes.base import AgentSandbox
from rollart_sandboxes.cgroup import Cgroup
from rollart_sandboxes.config import BubblewrapConfig, SandboxConfig, folder_bytes
from rollart_sandboxes.connection import bootstrap
from rollart_sandboxes.reach import reach
from rollart_sandboxes.spawn import spawn

WORK: Final = "/work"
_UID: Final = 1000
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt")
_ETC: Final = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "mime.types")
_USERS: Final = f"box:x:{_UID}:{_UID}::{WORK}:/bin/sh\n".encode()
_GROUPS: Final = f"box:x:{_UID}:\n".encode()
_FLAGS: Final = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"),
    *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
    *("--disable-userns", "--cap-drop", "ALL", "--hostname", "box"),
    *("--uid", str(_UID), "--gid", str(_UID)),
)


class BubblewrapSandbox(AgentSandbox):
    """A box of Linux namespaces; needs ``bwrap`` and user namespaces."""

    config_class: ClassVar[type[SandboxConfig]] = BubblewrapConfig

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        assert isinstance(self._config, BubblewrapConfig)
        self._options = self._config
        self._cgroup: Cgroup | None = None
        self._info: int | None = None

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove what dead processes left: their snapshots, and boxes that never began."""
        return [*await super().sweep(), *await bubblewrap_host.sweep()]

    @classmethod
    async def examine(cls) -> list[Finding]:
        """Say what bubblewrap, the kernel and the cgroups of this machine allow."""
        return await bubblewrap_host.examine()

    @property
    def enforced_by(self) -> dict[str, str]:
        """What holds each limit: ``cgroup``, ``rlimit`` or ``tmpfs``; empty: nothing does."""
        held = self._cgroup.held if self._cgroup else frozenset()
        return {
            "memory_bytes": "cgroup" if "memory" in held else "rlimit",
            "num_pids": "cgroup" if "pids" in held else "rlimit",
            "cpus": "cgroup" if "cpu" in held else "",
            "disk_bytes": "tmpfs",
        }

    async def _launch(self) -> asyncio.subprocess.Process:
        prefix = launcher(self._options.host_uid)
        way, sources = reach(self._options.ro_binds)
        filter_ = system_calls()
        self._info, info = os.pipe()
        files = [(_pipe(_USERS), "/etc/passwd"), (_pipe(_GROUPS), "/etc/group")]
        calls = _pipe(filter_)
        fds = [info, calls, *(fd for fd, _ in files)]
        argv = [*way, *prefix, *_FLAGS, "--info-fd", str(info), "--seccomp", str(calls)]
        argv += arguments(self._options, sources)
        for fd, path in files:
            argv += ["--ro-bind-data", str(fd), path]
        # Last, since nothing can be mounted in what is read-only; what is below stays as it is.
        argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
        argv += [self._options.python, "-I", "-S", "-c", bootstrap()]
        try:
            return await spawn(argv, pass_fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    async def _launched(self) -> None:
        """Put the agent in its cgroup; it waits for its source, so nothing has run yet."""
        self.agent_pid = await self._read_pid()
        if self._options.cgroup:
            self._cgroup = Cgroup.make(
                memory_bytes=self._options.memory_bytes,
                num_pids=self._options.num_pids,
                cpus=self._options.cpus,
            )
            for folder in self._cgroup.folders:
                self.leaves("cgroup", str(folder))
            self._cgroup.add(self.agent_pid)

    async def _read_pid(self) -> int:
        info, self._info = self._info, None
        assert info is not None
        try:
            said = await asyncio.to_thread(_read_all, info)
            return int(json.loads(said)["child-pid"])
        except (ValueError, KeyError) as e:
            if self._process is not None:
                await self._process.wait()
            message = f"bubblewrap did not start{await self._explain()}. {_mend()}"
            raise SandboxFailure(message, boundary="sandbox.start") from e

    def _hello(self) -> dict[str, Any]:
        options, held = self._options, self.enforced_by
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": options.num_open_files}
        if held["memory_bytes"] == "rlimit":
            limits["RLIMIT_AS"] = options.memory_bytes
        if held["num_pids"] == "rlimit":
            limits["RLIMIT_NPROC"] = options.num_pids
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {
            "root": WORK,
            "more_roots": ["/tmp", "/dev/shm"],
            "limits": limits,
            "env": {"PATH": path, "LANG": "C.UTF-8", "USER": "box", **options.env},
        }

    async def _gone(self) -> None:
        if self._info is not None:
            os.close(self._info)
            self._info = None
        if self._cgroup is not None:
            await self._cgroup.remove()


def arguments(options: BubblewrapConfig, sources: Mapping[str, str] | None = None) -> list[str]:
    """Return what bubblewrap is told of the box's files; ``sources``: where some are found."""
    argv = list(_system(Path(options.rootfs)))
    tmp = str(folder_bytes(options.tmp_bytes, options.memory_bytes))
    disk = str(folder_bytes(options.disk_bytes, options.memory_bytes))
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", tmp, "--tmpfs", "/dev/shm"]
    argv += ["--perms", "1777", "--size", tmp, "--tmpfs", "/tmp"]
    argv += ["--size", disk, "--tmpfs", WORK]
    for path in options.ro_binds:  # last, so that one below /tmp is seen
        argv += ["--ro-bind", (sources or {}).get(path, path), path]
    return argv


def _system(rootfs: Path) -> Iterator[str]:
    for name in _SYSTEM:
        path = rootfs / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), f"/{name}")
        elif path.is_dir():
            yield from ("--ro-bind", str(path), f"/{name}")
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in _ETC:
        yield from ("--ro-bind-try", str(rootfs / "etc" / name), f"/etc/{name}")


@cache
def launcher(host_uid: int) -> tuple[str, ...]:
    """Return how bubblewrap is called; root gives up being root first.

    Raises:
        SandboxFailure: When something is missing, and what to do about it.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        message = (
            "bubblewrap is not installed: install the package bubblewrap, "
            "or take the sandbox docker, or process for trusted code"
        )
        raise _unfit(message)
    if os.geteuid() != 0:
        return (bwrap,)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        message = "setpriv (of util-linux) is missing, and a box must not be root's: install it"
        raise _unfit(message)
    ids = str(host_uid)
    return (setpriv, "--reuid", ids, "--regid", ids, "--clear-groups", "--", bwrap)


@cache
def system_calls() -> bytes:
    """Return the filter of this machine type.

    Raises:
        SandboxFailure: When there is none.
    """
    machine = os.uname().machine
    found = seccomp.program(machine)
    if found is None:
        known = " and ".join(seccomp.MACHINES)
        raise _unfit(
            f"bubblewrap boxes filter system calls, on {known} only, and this machine is "
            f"{machine}: take the sandbox docker, or process for trusted code"
        )
    return found


def _unfit(message: str) -> SandboxFailure:
    failure = SandboxFailure(message, boundary="sandbox.start")
    failure.retryable = False
    return failure


def _mend() -> str:
    """Return what may keep user namespaces from working here, and the remedy."""
    off = bubblewrap_host.switched_off()
    if off:
        return f"User namespaces are off: {off}; an administrator can change it"
    return "Is the machine a container that allows no user namespaces?"


def _pipe(content: bytes) -> int:
    """Return a pipe that holds something short."""
    reads, writes = os.pipe()
    os.write(writes, content)
    os.close(writes)
    return reads


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()
