"""Garbage collection: remove what killed processes left of their sandboxes.

Takes: the ledger, and what sandbox types find by their own marks. Gives: what was removed, and what
could not be. Never: removes a sandbox whose owner is alive, or a path without RollArt's prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import first_line
from rollart_core.plugins import registry
from rollart_sandboxes.pool.live import LiveSandboxes, SandboxRecord

_OURS: Final = "rollart-"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_TRIES: Final = 100
_LEISURE_S: Final = 15.0
_NO_ISOLATION: Final = frozenset({"cgroup", "folder", "usage"})
"""Kinds that are removed without the sandbox type, or that do not belong to the sandbox."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """The result of a garbage collection."""

    removed: list[str] = field(default_factory=list)
    """One text for each sandbox, and for each removed item without a line in the ledger."""
    failed: list[str] = field(default_factory=list)
    """What could not be removed, and why."""
    unasked: list[str] = field(default_factory=list)
    """Sandbox types that could not be searched for items of dead owners, and why."""


async def collect_garbage(ledger: LiveSandboxes, *, sweep: Iterable[str] = ()) -> Reaped:
    """Remove the sandboxes of killed processes.

    Args:
        ledger: The ledger with the orphans.
        sweep: Ids of sandbox types that search for items of dead owners that are in no ledger.
    """
    async with ledger.locked():
        orphans = [record for record in ledger.records() if record.is_orphan]
        claimed = [(record, ledger.claim(record)) for record in orphans]
    done = Reaped()
    for record, line in claimed:
        if line is None:
            continue
        faults = await _remove(record)
        line.close(is_gone=not faults)
        done.failed.extend(f"{record.name}: {fault}" for fault in faults)
        if not faults:
            done.removed.append(f"{record.name} ({record.sandbox}, of process {record.pid})")
    for name in sweep:
        await _sweep(name, done)
    return done


async def collect_garbage_in_background(sandbox: str | None = None) -> None:
    """Remove what can be removed in a few seconds; `rollart sandbox gc` reports the errors.

    Args:
        sandbox: Id of a sandbox type to sweep; if None, only the ledger is used.
    """
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_LEISURE_S):
            await collect_garbage(LiveSandboxes(), sweep=[sandbox] if sandbox else [])


async def _remove(record: SandboxRecord) -> list[str]:
    """Remove one sandbox; return what could not be removed."""
    faults = [fault for path in record.left.get("cgroup", ()) if (fault := await _end(Path(path)))]
    if set(record.left) - _NO_ISOLATION:
        faults += await _by_its_sandbox(record.sandbox, record.left)
    folders = record.left.get("folder", ())
    return faults + [fault for path in folders if (fault := _delete(Path(path)))]


async def _by_its_sandbox(sandbox: str, left: Mapping[str, Sequence[str]]) -> list[str]:
    try:
        kind: type[Sandbox] = registry.resolve("sandboxes", sandbox)
        return await kind.remove(left)
    except Exception as e:  # an error of one plugin does not stop the others
        return [f"{type(e).__name__}: {first_line(str(e))}"]


async def _sweep(sandbox: str, done: Reaped) -> None:
    try:
        kind: type[Sandbox] = registry.resolve("sandboxes", sandbox)
        done.removed.extend(await kind.sweep())
    except Exception as e:  # for example, this machine has no Docker engine
        done.unasked.append(f"{sandbox}: {first_line(str(e)) or type(e).__name__}")


async def _end(group: Path) -> str:
    """Kill the processes in a cgroup and remove it."""
    if not group.is_relative_to(_CGROUPS) or not group.name.startswith(_OURS):
        return f"{group} is not a cgroup of RollArt"
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            group.rmdir()
        except FileNotFoundError:
            return ""
        except OSError:
            await asyncio.sleep(0.01)
    return f"{group} cannot be removed" if group.exists() else ""


def _delete(folder: Path) -> str:
    if not folder.is_absolute() or not folder.name.startswith(_OURS) or ".." in folder.parts:
        return f"{folder} is not a folder of RollArt"
    shutil.rmtree(folder, ignore_errors=True)
    return f"{folder} cannot be removed" if folder.exists() else ""
