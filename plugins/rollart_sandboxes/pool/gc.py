"""Reaping: what killed processes left of their boxes is removed.

Takes: the ledger, and what walls find by their own marks. Gives: what was removed, and what could
not be. Never: touches a box whose owner lives, or a path that is not by its name one of ours.
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
_NO_WALLS: Final = frozenset({"cgroup", "folder", "usage"})
"""What is removed without the wall, or is not the box's own."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a reaping did."""

    removed: list[str] = field(default_factory=list)
    """One text for each box, or for each thing without a line in the ledger."""
    failed: list[str] = field(default_factory=list)
    """What is still there, and why."""
    unasked: list[str] = field(default_factory=list)
    """Walls that could not be asked for what bears a dead owner's mark, and why."""


async def collect_garbage(ledger: LiveSandboxes, *, sweep: Iterable[str] = ()) -> Reaped:
    """Remove the boxes of killed processes.

    Args:
        ledger: Whose orphans.
        sweep: Ids of walls that look for what bears a dead owner's mark but stands in no ledger.
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
    for wall in sweep:
        await _sweep(wall, done)
    return done


async def collect_garbage_in_background(sandbox: str | None = None) -> None:
    """Remove what can be removed in a few seconds; `rollart sandbox gc` says what is wrong.

    Args:
        sandbox: Id of a wall to sweep; None: only what stands in the ledger.
    """
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_LEISURE_S):
            await collect_garbage(LiveSandboxes(), sweep=[sandbox] if sandbox else [])


async def _remove(record: SandboxRecord) -> list[str]:
    """Remove one box; return what is still there."""
    faults = [fault for path in record.left.get("cgroup", ()) if (fault := await _end(Path(path)))]
    if set(record.left) - _NO_WALLS:
        faults += await _by_its_sandbox(record.sandbox, record.left)
    folders = record.left.get("folder", ())
    return faults + [fault for path in folders if (fault := _delete(Path(path)))]


async def _by_its_sandbox(sandbox: str, left: Mapping[str, Sequence[str]]) -> list[str]:
    try:
        wall: type[Sandbox] = registry.resolve("sandboxes", sandbox)
        return await wall.remove(left)
    except Exception as e:  # whatever a plugin raises, the others are reaped
        return [f"{type(e).__name__}: {first_line(str(e))}"]


async def _sweep(sandbox: str, done: Reaped) -> None:
    try:
        wall: type[Sandbox] = registry.resolve("sandboxes", sandbox)
        done.removed.extend(await wall.sweep())
    except Exception as e:  # such as an engine that this machine does not have
        done.unasked.append(f"{sandbox}: {first_line(str(e)) or type(e).__name__}")


async def _end(group: Path) -> str:
    """Kill what is in a cgroup and remove it."""
    if not group.is_relative_to(_CGROUPS) or not group.name.startswith(_OURS):
        return f"{group} is not a cgroup of ours"
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
        return f"{folder} is not a folder of ours"
    shutil.rmtree(folder, ignore_errors=True)
    return f"{folder} cannot be removed" if folder.exists() else ""
