"""The sandbox type ``bubblewrap``: Linux namespaces around the agent, without a daemon or an image.

Takes: options. Gives: the Sandbox contract: read-only system folders; a working folder, ``/tmp``
and ``/dev/shm`` in memory, each with a size limit; no network, no capabilities, no way to gain any;
and a filter of system calls. If root starts the sandbox, folders that only root can enter (a Python
below ``/root``, for example) are bind-mounted where the sandbox's user can read them, in a mount
namespace that ends with the sandbox. For ``rollart sandbox doctor``: what it needs and finds on
this machine, and how to fix it. Never: runs as root on the host, or shows the host's processes,
homes or temporary files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from rollart_core.contracts.host import Finding
from rollart_core.errors import SandboxFailure
from rollart_sandboxes import seccomp
from rollart_sandboxes.base import AgentSandbox
from rollart_sandboxes.cgroup import Cgroup
from rollart_sandboxes.config import BubblewrapConfig, SandboxConfig, folder_bytes
from rollart_sandboxes.connection import bootstrap
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

_PLACES: Final = ("/mnt", "/media", "/srv")
_SCRIPT: Final = """
place=$1; shift; n=0
mount -t tmpfs -o mode=0755,size=1m rollart "$place" || exit 1
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "$place/$n"; else : > "$place/$n"; fi
  mount --bind "$1" "$place/$n" || exit 1
  n=$((n + 1)); shift
done
shift; exec "$@"
"""

_TIMEOUT_S: Final = 10.0
_SWITCHES: Final = (
    ("user/max_user_namespaces", "0"),
    ("kernel/unprivileged_userns_clone", "0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),
)
_LIMITS: Final = {"memory": "memory_bytes", "pids": "num_pids", "cpu": "cpus"}


class BubblewrapSandbox(AgentSandbox):
    """A sandbox of Linux namespaces; needs ``bwrap`` and user namespaces."""

    config_class: ClassVar[type[SandboxConfig]] = BubblewrapConfig

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        assert isinstance(self._config, BubblewrapConfig)
        self._options = self._config
        self._cgroup: Cgroup | None = None
        self._info: int | None = None

    @classmethod
    async def sweep(cls) -> list[str]:
        """Remove what dead processes left: snapshots, and sandboxes that never started."""
        return [*await super().sweep(), *await sweep()]

    @classmethod
    async def examine(cls) -> list[Finding]:
        """Report what bubblewrap, the kernel and the cgroups of this machine allow."""
        return await examine()

    @property
    def enforced_by(self) -> dict[str, str]:
        """What enforces each limit: ``cgroup``, ``rlimit`` or ``tmpfs``; empty if nothing does."""
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
        # Last, because nothing can be mounted in a read-only mount; mounts below it do not change.
        argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
        argv += [self._options.python, "-I", "-S", "-c", bootstrap()]
        try:
            return await spawn(argv, pass_fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    async def _launched(self) -> None:
        """Put the agent in its cgroup. It waits for its source, so nothing has run yet."""
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
    """Return bubblewrap's file arguments; ``sources`` maps a path to where it is found."""
    argv = list(_system(Path(options.rootfs)))
    tmp = str(folder_bytes(options.tmp_bytes, options.memory_bytes))
    disk = str(folder_bytes(options.disk_bytes, options.memory_bytes))
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", tmp, "--tmpfs", "/dev/shm"]
    argv += ["--perms", "1777", "--size", tmp, "--tmpfs", "/tmp"]
    argv += ["--size", disk, "--tmpfs", WORK]
    for path in options.ro_binds:  # last, so that a path below /tmp is visible
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
    """Return the command prefix that runs bubblewrap; root drops its user id first.

    Raises:
        SandboxFailure: If a program is missing; the message says how to install it.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        message = (
            "bubblewrap is not installed: install the package bubblewrap, or use the sandbox "
            "docker, or process for trusted code"
        )
        raise _unfit(message)
    if os.geteuid() != 0:
        return (bwrap,)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        message = "setpriv is missing, so the sandbox would run as root: install util-linux"
        raise _unfit(message)
    ids = str(host_uid)
    return (setpriv, "--reuid", ids, "--regid", ids, "--clear-groups", "--", bwrap)


@cache
def system_calls() -> bytes:
    """Return the seccomp filter for this machine type.

    Raises:
        SandboxFailure: If there is none.
    """
    machine = os.uname().machine
    found = seccomp.program(machine)
    if found is None:
        known = " and ".join(seccomp.MACHINES)
        raise _unfit(
            f"bubblewrap sandboxes need a system call filter, which exists for {known}, not for "
            f"{machine}: use the sandbox docker, or process for trusted code"
        )
    return found


def _unfit(message: str) -> SandboxFailure:
    failure = SandboxFailure(message, boundary="sandbox.start")
    failure.retryable = False
    return failure


def _mend() -> str:
    """Return the likely reason why user namespaces do not work here, and the fix."""
    off = switched_off()
    if off:
        return f"User namespaces are off: {off}. An administrator can change this setting"
    return "Does this machine run in a container that forbids user namespaces?"


def _pipe(content: bytes) -> int:
    """Return the read end of a pipe that holds a short content."""
    reads, writes = os.pipe()
    os.write(writes, content)
    os.close(writes)
    return reads


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def reach(paths: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a command prefix that makes these paths readable, and where the sandbox finds them.

    Only root needs the prefix. Sandboxes of other users read what the run itself can read.
    """
    sources = {path: path for path in paths}
    closed = [p for p in paths if os.geteuid() == 0 and not _open_to_all(Path(p).resolve())]
    unshare = shutil.which("unshare")
    place = next((p for p in _PLACES if _free(p, paths)), None)
    if not closed or unshare is None or place is None:
        return (), sources
    sources.update({path: f"{place}/{n}" for n, path in enumerate(closed)})
    prefix = (unshare, "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _SCRIPT)
    return (*prefix, "sh", place, *closed, "--"), sources


def _open_to_all(path: Path) -> bool:
    """Whether every user can pass through the folders above."""
    try:
        return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    except OSError:
        return True  # bubblewrap reports the error


def _free(place: str, paths: Sequence[str]) -> bool:
    return Path(place).is_dir() and not any(p == place or p.startswith(f"{place}/") for p in paths)


async def examine() -> list[Finding]:
    """Return the findings on this machine."""
    programs = [await asyncio.to_thread(_bwrap), _setpriv(), _python(), _filter()]
    found = [*programs, _namespaces(), *await _limits()]
    return [finding for finding in found if finding is not None]


def switched_off() -> str:
    """Return the kernel setting that forbids user namespaces here; empty if there is none."""
    for name, off in _SWITCHES:
        path = Path("/proc/sys", name)
        if path.exists() and path.read_text().strip() == off:
            return f"{name.replace('/', '.')} is {off}"
    return ""


def _bwrap() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        mend = "install the package bubblewrap (`apt-get install bubblewrap`)"
        return Finding("bubblewrap", "bad", "not installed", mend)
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as e:
        return Finding("bubblewrap", "bad", f"{path} does not run: {e}", "install it again")
    return Finding("bubblewrap", "ok", f"{said.stdout.strip()} at {path}")


def _setpriv() -> Finding | None:
    """Return whether root can drop its user id; None if this process is not root's."""
    if os.geteuid() != 0:
        return None
    path = shutil.which("setpriv")
    if path is None:
        return Finding("setpriv", "bad", "not installed", "install the package util-linux")
    uid = BubblewrapConfig().host_uid
    return Finding("setpriv", "ok", f"sandboxes that root starts run as uid {uid}")


def _python() -> Finding:
    path = Path(BubblewrapConfig().python)
    if path.exists():
        return Finding("python", "ok", f"{path} -> {path.resolve().name}")
    mend = "install Python 3.8 or newer there, or set the option python"
    return Finding("python", "warn", f"{path}, which runs the agent, does not exist", mend)


def _filter() -> Finding:
    machine = platform.machine()
    if machine in seccomp.MACHINES:
        return Finding("system calls", "ok", f"a seccomp filter for {machine}")
    known = " and ".join(seccomp.MACHINES)
    mend = f"use the sandbox docker, or a machine of type {known}"
    return Finding("system calls", "bad", f"there is no seccomp filter for {machine}", mend)


def _namespaces() -> Finding:
    off = switched_off()
    if off:
        key, _, value = off.partition(" is ")
        mend = f"`sysctl -w {key}={'0' if value == '1' else '10000' if 'max' in key else '1'}`"
        return Finding("user namespaces", "bad", f"forbidden: {off}", f"{mend} as root")
    return Finding("user namespaces", "ok", f"allowed, Linux {platform.release()}")


async def _limits() -> list[Finding]:
    """Return what enforces each limit; create a cgroup as a sandbox would."""
    group = Cgroup.make(memory_bytes=1 << 28, num_pids=64, cpus=1.0)
    try:
        held = group.held
    finally:
        await group.remove()
    return [
        _limit(controller, option, controller in held) for controller, option in _LIMITS.items()
    ]


def _limit(controller: str, option: str, is_held: bool) -> Finding:
    if is_held:
        return Finding(controller, "ok", f"a cgroup enforces {option}")
    mend = (
        f"start the run where it can create cgroups with the controller {controller}: "
        "`systemd-run --user --scope -p Delegate=yes rollart run ...`"
    )
    instead = {"memory": "a limit per process", "pids": "a limit per user"}.get(controller)
    says = f"no cgroup; {instead} enforces {option}" if instead else f"nothing enforces {option}"
    return Finding(controller, "warn", says, mend)


async def sweep() -> list[str]:
    """Kill processes that remain if bubblewrap was killed before the sandbox could start.

    Such a child waits forever for its monitor, which is gone: it still is bubblewrap, it is in a
    process-id namespace below ours, and it is not a child of a bubblewrap process.
    """
    left = [pid for pid in _pids() if _is_orphan(pid)]
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if not any(_runs(pid) for pid in left):
            break
        await asyncio.sleep(0.01)
    return [f"process {pid}, a sandbox that never started" for pid in left]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _runs(pid: int) -> bool:
    try:
        return _status(pid)["State"][0] not in "ZX"
    except (OSError, KeyError):
        return False


def _is_orphan(pid: int) -> bool:
    try:
        status = _status(pid)
        if status["Name"] != "bwrap" or status["State"][0] in "ZX":
            return False
        below_ours = len(status["NSpid"].split()) > len(_status(os.getpid())["NSpid"].split())
        ours = b"--hostname\0box\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return below_ours and ours and _status(int(status["PPid"]))["Name"] != "bwrap"
    except (OSError, KeyError):
        return False  # the process has ended


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
