"""The doctor: tests which sandbox types work on this machine, and reports how to fix the others.

Takes: the installed sandboxes. Gives: for each, its requirements on this machine, and the result of
starting a sandbox. Never: reports a sandbox type as working without a successful start.
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
    """One sandbox type on this machine."""

    sandbox: str
    """Its alias, or else its id."""
    isolation: str
    works: bool
    findings: tuple[Finding, ...]
    start_ms: float | None = None
    """Milliseconds that the start of a sandbox took; None if none started."""

    @property
    def isolates(self) -> bool:
        """True if it isolates code, and is not only for trusted code."""
        return self.isolation != "none"


def sandbox_types() -> list[str]:
    """Return the installed sandbox types, by alias."""
    specs = (registry.spec("sandboxes", name) for name in registry.names("sandboxes"))
    return sorted({spec.alias or spec.id for spec in specs})


async def diagnose(sandbox: str, options: Mapping[str, Any] | None = None) -> SandboxDiagnosis:
    """Examine one sandbox type and start a sandbox of it; runs on the sandboxes' loop.

    Args:
        sandbox: Id or alias.
        options: Options of the sandbox that is started.

    Raises:
        UserError: If there is no such sandbox, or no such option.
    """
    spec = registry.spec("sandboxes", sandbox)
    kind: type[Sandbox] = registry.resolve("sandboxes", sandbox)
    chosen = {**kind.trial, **(options or {})}
    registry.checked_options("sandboxes", sandbox, chosen)
    findings = await _examined(kind)
    start_ms = None
    if not any(finding.state == "bad" for finding in findings):
        finding, start_ms = await _tried(sandbox, chosen)
        findings.append(finding)
    return SandboxDiagnosis(
        sandbox=spec.alias or spec.id,
        isolation=getattr(spec, "isolation", "none"),
        works=start_ms is not None,
        findings=tuple(findings),
        start_ms=start_ms,
    )


def machine() -> list[Finding]:
    """Return the resources of this machine for sandboxes of any type."""
    found, disk, ledger = look(), free_disk_bytes(), LiveSandboxes()
    where = f" in {found.held_by}" if found.held_by else ""
    memory = f"{found.available_bytes / _GIB:.1f} of {found.memory_bytes / _GIB:.1f} GiB available"
    group = own_group("memory")
    version = "none" if group is None else "1" if (group / "tasks").exists() else "2"
    disk_space = Finding("disk", "ok", f"{disk / _GIB:.1f} GiB free for temporary files")
    if disk < _LITTLE_DISK:
        mend = "free disk space: snapshots of sandboxes are stored there"
        disk_space = Finding("disk", "warn", disk_space.says, mend)
    return [
        Finding("memory", "ok", memory + where),
        Finding("processors", "ok", f"{found.num_cpus:g}"),
        Finding("cgroups", "warn" if group is None else "ok", f"version {version} limits memory"),
        disk_space,
        Finding("ledger", "ok", str(ledger.folder)),
    ]


async def _examined(kind: type[Sandbox]) -> list[Finding]:
    try:
        async with asyncio.timeout(_EXAMINE_S):
            return list(await kind.examine())
    except Exception as e:  # a sandbox type whose examination fails does not work
        reason = f"{type(e).__name__}: {first_line(str(e))}"
        return [Finding("examination", "bad", reason)]


async def _tried(sandbox: str, options: Mapping[str, Any]) -> tuple[Finding, float | None]:
    """Start a sandbox, run a command in it, and close it."""
    source = SandboxSource(sandbox, options)
    began = time.perf_counter()
    try:
        taken = await source.take()
        start_ms = (time.perf_counter() - began) * 1e3
        try:
            result = await taken.exec(["echo", "ok"], timeout_s=_EXEC_S)
        finally:
            await source.give_back(taken)
    except (RollartError, OSError) as e:
        return Finding("a sandbox", "bad", first_line(str(e))), None
    if (result.exit_code, result.stdout) != (0, b"ok\n"):
        return Finding("a sandbox", "bad", f"`echo ok` returned {result}"), None
    return Finding("a sandbox", "ok", f"started in {start_ms:.0f} ms and ran a command"), start_ms
