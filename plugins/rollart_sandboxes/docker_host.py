"""The host side of Docker sandboxes: the engine's abilities, images, and garbage collection.

Takes: an engine. Gives: the limits it can enforce, an image that exists, findings for a person; it
removes containers of dead owners. Never: changes a container without this project's label.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rollart_core.contracts.host import Finding
from rollart_core.errors import SandboxFailure
from rollart_core.rollout import loop
from rollart_sandboxes.container import remove
from rollart_sandboxes.engine import Engine, EngineError, unfit
from rollart_sandboxes.pool.owner import OWNER_LABEL, is_orphan

if TYPE_CHECKING:
    from rollart_sandboxes.config import DockerConfig

TTL_LABEL: Final = "rollart.ttl"
PREFIX: Final = "rollart-"
_FRESH_S: Final = 60.0
_OVERDUE_S: Final = 300.0
"""Seconds after the end of its lifetime at which a sandbox of any owner is removed."""
_PULL_S: Final = 1800.0
_NOWHERE: Final = (
    "there is no image {!r} on the Docker engine at {}, and it cannot be pulled ({}): `docker "
    "load` it, or set the option image to another one"
)
_LOOK_S: Final = 10.0
"""Time limit of the engine to report its own state and whether an image exists."""

_known: dict[str, tuple[float, dict[str, Any]]] = {}
_pulls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = (
    weakref.WeakKeyDictionary()
)


async def about(engine: Engine) -> dict[str, Any]:
    """Return the engine's description of itself, at most a minute old."""
    at, found = _known.get(engine.host, (0.0, {}))
    if not found or time.monotonic() - at > _FRESH_S:
        found = await engine.ask("GET", "/info")
        _known[engine.host] = (time.monotonic(), found)
    return found


async def image(engine: Engine, options: DockerConfig) -> dict[str, Any]:
    """Return the engine's data about an image; pull it if needed and allowed.

    Raises:
        SandboxFailure: If there is no such image.
    """
    name = options.image
    found = await _image(engine, name)
    if found is None and options.pull == "missing":
        locks = _pulls.setdefault(asyncio.get_running_loop(), {})
        async with locks.setdefault(f"{engine.host} {name}", asyncio.Lock()):
            found = await _image(engine, name)
            if found is None:
                await _pull(engine, name)
                found = await _image(engine, name)
    if found is None:
        raise unfit(
            f"there is no image {name!r} on the Docker engine at {engine.host}: `docker pull` or "
            "`docker load` it, set the option image to another one, or set pull: missing"
        )
    return found


def fault(options: DockerConfig) -> dict[str, str]:
    """Return, by option, the engine or the image that is missing, without a pull."""
    try:
        loop.run(_there(options))
    except SandboxFailure as e:
        return {"image" if "image" in str(e) else "host": str(e)}
    return {}


async def _there(options: DockerConfig) -> None:
    engine = Engine(options.host, timeout_s=_LOOK_S)
    await about(engine)
    if options.pull == "never" or await _image(engine, options.image) is not None:
        await image(engine, options)
        return
    try:  # the engine queries the registry, and pulls nothing
        await engine.ask("GET", f"/distribution/{quote(options.image)}/json")
    except EngineError as e:
        raise unfit(_NOWHERE.format(options.image, engine.host, e.said)) from e


async def _image(engine: Engine, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = await engine.ask("GET", f"/images/{quote(name)}/json")
    except EngineError as e:
        if e.status == 404:
            return None
        if e.status == 400:
            raise unfit(f"{name!r} is not a valid name of an image: {e.said}") from e
        raise
    return found


async def _pull(engine: Engine, name: str) -> None:
    base, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        base, tag = name, "latest"
    query = {"fromImage": name} if "@" in name else {"fromImage": base, "tag": tag}
    said: Any = None
    try:
        said = await engine.ask("POST", "/images/create", query=query, timeout_s=_PULL_S)
    except EngineError as e:
        said = {"error": e.said}
    lines = said if isinstance(said, list) else [said]
    for line in lines:
        if isinstance(line, dict) and "error" in line:
            raise unfit(
                f"the image {name!r} cannot be pulled ({line['error']}): `docker load` it, or "
                "set the option image to one that exists"
            )


async def sweep(engine: Engine) -> list[str]:
    """Remove the containers of owners that are gone; return what was removed."""
    query = {"all": 1, "filters": {"label": [OWNER_LABEL]}}
    removed = []
    for found in await engine.ask("GET", "/containers/json", query=query):
        marks = found.get("Labels") or {}
        if is_orphan(marks) or _is_overdue(marks, found["Created"]):
            with contextlib.suppress(SandboxFailure):
                await remove(engine, found["Id"])
                name = found["Names"][0].lstrip("/") if found.get("Names") else found["Id"][:12]
                removed.append(f"container {name}, of process {marks[OWNER_LABEL]}")
    return removed


def _is_overdue(marks: Mapping[str, str], created: float) -> bool:
    try:
        ends_at = created + float(marks[TTL_LABEL])
    except (KeyError, ValueError):
        return False
    return time.time() > ends_at + _OVERDUE_S


def users(about: Mapping[str, Any]) -> str:
    """Return how root of a sandbox maps to another user on the host; empty if it does not."""
    options = " ".join(about.get("SecurityOptions") or [])
    if "name=rootless" in options:
        return "rootless"
    return "remap" if "name=userns" in options else ""


async def examine(image: str) -> list[Finding]:
    """Report the state of this machine's engine, its limits and its images.

    Args:
        image: The default image.
    """
    try:
        engine = Engine()
        known = await engine.ask("GET", "/info", timeout_s=10.0)
    except SandboxFailure as e:
        said, _, mend = str(e).partition(": ")
        return [Finding("engine", "bad", said, mend)]
    kind = f"{known.get('ServerVersion')} at {engine.host}, {known.get('Driver')}"
    found = [Finding("engine", "ok", f"{kind}, cgroup version {known.get('CgroupVersion')}")]
    found += [_limit(known, *limit) for limit in _LIMITS]
    found += [_seccomp(known), _apart(known)]
    names = ", ".join(sorted(known.get("Runtimes") or {}))
    return [*found, Finding("runtimes", "ok", names), await _default_image(engine, image)]


async def _default_image(engine: Engine, name: str) -> Finding:
    if await _image(engine, name) is not None:
        return Finding("image", "ok", f"{name} exists")
    others = await _names(engine)
    there = f" (available: {', '.join(others[:3])}: `rollart sandbox doctor docker image=NAME`)"
    mend = f"`docker pull {name}`, or set the option image to another one{there if others else ''}"
    return Finding("image", "warn", f"the default image {name} does not exist here", mend)


async def _names(engine: Engine) -> list[str]:
    """Return the names of the available images, newest first."""
    images = await engine.ask("GET", "/images/json")
    names = [name for found in images for name in found.get("RepoTags") or []]
    return [name for name in names if name != "<none>:<none>"]


_LIMITS: Final = (
    ("MemoryLimit", "memory_bytes", "memory"),
    ("SwapLimit", "memory_bytes, swap included", "swap"),
    ("PidsLimit", "num_pids", "pids"),
    ("CpuCfsQuota", "cpus", "cpu"),
)


def _limit(known: Mapping[str, Any], key: str, option: str, controller: str) -> Finding:
    if known.get(key):
        return Finding(controller, "ok", f"a cgroup enforces {option}")
    mend = f"start the engine where the cgroup controller {controller} is enabled"
    return Finding(controller, "warn", f"nothing enforces {option}", mend)


def _seccomp(known: Mapping[str, Any]) -> Finding:
    options = known.get("SecurityOptions") or []
    if any("name=seccomp" in option and "unconfined" not in option for option in options):
        return Finding("seccomp", "ok", "the engine's profile filters system calls")
    mend = "start the engine without seccomp-profile: unconfined, on a kernel with seccomp"
    return Finding("seccomp", "warn", "no filter of system calls", mend)


def _apart(known: Mapping[str, Any]) -> Finding:
    how = users(known)
    if how:
        return Finding("users", "ok", f"root of a sandbox is another user on the host ({how})")
    mend = 'set "userns-remap": "default" in /etc/docker/daemon.json'
    said = "uid 1000 of a sandbox is uid 1000 of the host (the default user is not root)"
    return Finding("users", "warn", said, mend)
