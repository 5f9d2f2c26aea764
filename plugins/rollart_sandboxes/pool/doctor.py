"""The doctor: which walls work on this machine, and what to do about those that do not.

Takes: the installed sandboxes. Gives: for each what it needs and finds, and what came of really
starting a box. Never: takes a wall that only looks right for one that works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollart_core.contracts.host import Finding
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import RollartError, first_line
from rollart_core.plugins import registry
from rollart_sandboxes.pool.live import LiveSandboxes
from rollart_sandboxes.pool.machine import free_disk_bytes, look, own_group
from rollart_sandboxes.pool.source import SandboxSource

_EXAMINE_S: Final = 30.0
_EXEC_S: Final = 30.0
_LITTLE_DISK: Final = 2 << 30
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class SandboxDiagnosis:
    """One wall on this machine."""

    sandbox: str
    """Its alias, or else its id."""
    isolation: str
    works: bool
    findings: tuple[Finding, ...]
    start_ms: float | None = None
    """How long the start of a box took; None when none came up."""

    @property
    def isolates(self) -> bool:
        """True when it keeps code in, and is not just there for code that is trusted."""
        return self.isolation != "none"


def walls() -> list[str]:
    """Return the sandboxes that are installed, by alias."""
    specs = (registry.spec("sandboxes", name) for name in registry.names("sandboxes"))
    return sorted({spec.alias or spec.id for spec in specs})


async def diagnose(sandbox: str, options: Mapping[str, Any] | None = None) -> SandboxDiagnosis:
    """Examine one wall and start a box of it; on the boxes' loop.

    Args:
        sandbox: Id or alias.
        options: Of the box that is started.

    Raises:
        UserError: When there is no such sandbox, or no such option.
    """
    spec = registry.spec("sandboxes", sandbox)
    wall: type[Sandbox] = registry.resolve("sandboxes", sandbox)
    chosen = {**wall.trial, **(options or {})}
    registry.checked_options("sandboxes", sandbox, chosen)
    findings = await _examined(wall)
    start_ms = None
    if not any(finding.state == "bad" for finding in findings):
        box, start_ms = await _tried(sandbox, chosen)
        findings.append(box)
    return SandboxDiagnosis(
        sandbox=spec.alias or spec.id,
        isolation=getattr(spec, "isolation", "none"),
        works=start_ms is not None,
        findings=tuple(findings),
        start_ms=start_ms,
    )


def machine() -> list[Finding]:
    """Return what boxes of any kind find here."""
    found, disk, ledger = look(), free_disk_bytes(), LiveSandboxes()
    where = f" in {found.held_by}" if found.held_by else ""
    memory = f"{found.available_bytes / _GIB:.1f} of {found.memory_bytes / _GIB:.1f} GiB available"
    group = own_group("memory")
    version = "none" if group is None else "1" if (group / "tasks").exists() else "2"
    room = Finding("disk", "ok", f"{disk / _GIB:.1f} GiB free for temporary files")
    if disk < _LITTLE_DISK:
        mend = "free some: snapshots of boxes are kept there"
        room = Finding("disk", "warn", room.says, mend)
    return [
        Finding("memory", "ok", memory + where),
        Finding("processors", "ok", f"{found.num_cpus:g}"),
        Finding("cgroups", "warn" if group is None else "ok", f"version {version} holds memory"),
        room,
        Finding("ledger", "ok", str(ledger.folder)),
    ]


async def _examined(wall: type[Sandbox]) -> list[Finding]:
    try:
        async with asyncio.timeout(_EXAMINE_S):
            return list(await wall.examine())
    except Exception as e:  # a wall that cannot even be asked does not work
        reason = f"{type(e).__name__}: {first_line(str(e))}"
        return [Finding("examination", "bad", reason)]


async def _tried(sandbox: str, options: Mapping[str, Any]) -> tuple[Finding, float | None]:
    """Start a box, run a command in it, and close it."""
    source = SandboxSource(sandbox, options)
    began = time.perf_counter()
    try:
        box = await source.take()
        start_ms = (time.perf_counter() - began) * 1e3
        try:
            result = await box.exec(["echo", "ok"], timeout_s=_EXEC_S)
        finally:
            await source.give_back(box)
    except (RollartError, OSError) as e:
        return Finding("a box", "bad", first_line(str(e))), None
    if (result.exit_code, result.stdout) != (0, b"ok\n"):
        return Finding("a box", "bad", f"`echo ok` gave {result}"), None
    return Finding("a box", "ok", f"started in {start_ms:.0f} ms and ran a command"), start_ms
