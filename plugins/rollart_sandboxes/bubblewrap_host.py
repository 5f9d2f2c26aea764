"""What the light wall needs and finds on this machine, for ``rollart sandbox doctor``.

Takes: nothing. Gives: findings, each with the remedy. Never: starts a box; it makes a cgroup to see
whether it may, and removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from rollart_core.contracts.host import Finding
from rollart_sandboxes import seccomp
from rollart_sandboxes.cgroup import Cgroup
from rollart_sandboxes.config import BubblewrapConfig

_TIMEOUT_S: Final = 10.0
_SWITCHES: Final = (
    ("user/max_user_namespaces", "0"),
    ("kernel/unprivileged_userns_clone", "0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),
)
_LIMITS: Final = {"memory": "memory_bytes", "pids": "num_pids", "cpu": "cpus"}


async def examine() -> list[Finding]:
    """Return what there is."""
    programs = [await asyncio.to_thread(_bwrap), _setpriv(), _python(), _filter()]
    found = [*programs, _namespaces(), *await _limits()]
    return [finding for finding in found if finding is not None]


def switched_off() -> str:
    """Return the kernel setting that forbids user namespaces here; empty when none does."""
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
        return Finding("bubblewrap", "bad", f"{path} does not run: {e}", "install it anew")
    return Finding("bubblewrap", "ok", f"{said.stdout.strip()} at {path}")


def _setpriv() -> Finding | None:
    """Return whether root can stop being root, where this process is root's."""
    if os.geteuid() != 0:
        return None
    path = shutil.which("setpriv")
    if path is None:
        return Finding("setpriv", "bad", "not installed", "install the package util-linux")
    uid = BubblewrapConfig().host_uid
    return Finding("setpriv", "ok", f"boxes of root run as uid {uid}")


def _python() -> Finding:
    path = Path(BubblewrapConfig().python)
    if path.exists():
        return Finding("python", "ok", f"{path} -> {path.resolve().name}")
    mend = "install Python 3.8 or newer there, or name one with the option python"
    return Finding("python", "warn", f"there is no {path}, which runs the agent in a box", mend)


def _filter() -> Finding:
    machine = platform.machine()
    if machine in seccomp.MACHINES:
        return Finding("system calls", "ok", f"a seccomp filter for {machine}")
    known = " and ".join(seccomp.MACHINES)
    mend = f"take the sandbox docker, or a machine of {known}"
    return Finding("system calls", "bad", f"there is no seccomp filter for {machine}", mend)


def _namespaces() -> Finding:
    off = switched_off()
    if off:
        key, _, value = off.partition(" is ")
        mend = f"`sysctl -w {key}={'0' if value == '1' else '10000' if 'max' in key else '1'}`"
        return Finding("user namespaces", "bad", f"forbidden: {off}", f"{mend} as root")
    return Finding("user namespaces", "ok", f"allowed, Linux {platform.release()}")


async def _limits() -> list[Finding]:
    """Return what holds each limit, by making a cgroup as a box would."""
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
        return Finding(controller, "ok", f"a cgroup holds {option}")
    mend = (
        f"start the run where it may make cgroups with the controller {controller}: "
        "`systemd-run --user --scope -p Delegate=yes rollart run ...`"
    )
    instead = {"memory": "a limit of each process", "pids": "a limit of the user"}.get(controller)
    says = f"no cgroup; {instead} holds {option}" if instead else f"nothing holds {option}"
    return Finding(controller, "warn", says, mend)


async def sweep() -> list[str]:
    """Kill what bubblewrap left when it was killed between cloning a box and letting it begin.

    Such a child waits for ever for its monitor, which is gone: it is still bubblewrap, in a
    process-id namespace below ours, and no child of a bubblewrap.
    """
    left = [pid for pid in _pids() if _is_orphan(pid)]
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if not any(_runs(pid) for pid in left):
            break
        await asyncio.sleep(0.01)
    return [f"process {pid}, a box that never began" for pid in left]


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
        return False  # gone meanwhile


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
