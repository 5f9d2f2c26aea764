"""Plan an installation before anything is installed.

Takes: a verified view of a registry, an id, an interpreter. Gives: :class:`Plan`: the registry's
wheels (downloaded, verified, read) and the wheels pip would take from the user's index, each with
its hash. Never: allows pip to take a distribution of the registry's owners from an index.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rollart_core.errors import RegistryError
from rollart_core.plugins.manager import CORE
from rollart_registry.client import RegistryClient
from rollart_registry.interpreter import Pinned, TargetInterpreter
from rollart_registry.names import Wanted
from rollart_registry.release import Release
from rollart_registry.wheel import Wheel, parsed_requires


@dataclass(frozen=True, slots=True)
class Plan:
    """The packages to install, and those that stay."""

    wanted: Wanted
    releases: tuple[tuple[Release, Wheel], ...]
    """Releases from the registry; the requested one first."""
    pinned: tuple[Pinned, ...]
    """Packages from the user's index."""
    present: tuple[tuple[str, str], ...]
    """(name, version) of required packages that are installed already."""
    replaces: tuple[str, ...]
    """Installed distributions that other versions replace."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {
            "id": self.wanted.id,
            "registry": [release.as_dict() for release, _ in self.releases],
            "index": [
                {"name": p.name, "version": p.version, "sha256": p.sha256} for p in self.pinned
            ],
            "present": [{"name": name, "version": version} for name, version in self.present],
            "replaces": list(self.replaces),
        }


def make_plan(
    client: RegistryClient,
    wanted: Wanted,
    interpreter: TargetInterpreter,
    *,
    allow_yanked: bool = False,
    lock_all: bool = False,
) -> Plan:
    """Plan the installation of an id; the registry's wheels are downloaded and verified.

    Args:
        client: The registry.
        wanted: The id, with an optional version.
        interpreter: The interpreter to install into.
        allow_yanked: Allow a yanked version.
        lock_all: Also lock installed packages with a hash, so that the lock can fill an empty
            environment.

    Raises:
        RegistryError: If it cannot be installed safely; gives the reason.
    """
    first = client.find(wanted, allow_yanked=allow_yanked)
    wheels = _with_registry_dependencies(client, first, interpreter)
    check_no_shadowing([wheel for _, wheel in wheels], interpreter)
    paths = [wheel.path for _, wheel in wheels]
    report, _ = interpreter.resolve(paths, everything=lock_all)
    pinned = tuple(_pinned(entry) for entry in report if not _is_ours(entry, paths))
    for pin in pinned:
        owner = client.owner_of(pin.name)
        if owner is not None:
            raise RegistryError(
                f"pip would take {pin.name} {pin.version} from your index, but {pin.name!r} is a "
                f"package of {owner!r} in {client.base}: refused, because anybody could slip one in"
            )
    coming = {p.name for p in pinned} | {w.distribution for _, w in wheels}
    return Plan(
        wanted=wanted,
        releases=tuple(wheels),
        pinned=pinned,
        present=tuple(sorted(_present([w for _, w in wheels], interpreter, coming))),
        replaces=tuple(_replaced(interpreter, [*pinned, *(r for r, _ in wheels)])),
    )


def check_no_shadowing(wheels: Sequence[Wheel], interpreter: TargetInterpreter) -> None:
    """Check that wheels do not overwrite files of each other or of installed distributions.

    Raises:
        RegistryError: If they do; names the package, module or script.
    """
    for wheel in wheels:
        for installed in interpreter.installed.values():
            both = wheel.tops & installed.tops
            if both and installed.name != wheel.distribution:
                raise RegistryError(
                    f"{wheel.name} brings {min(both)!r}, which {installed.name} "
                    f"{installed.version} has installed: one overwrites the other"
                )
        _check_scripts(wheel, interpreter)
    for one, other in combinations(wheels, 2):
        if one.scripts.keys() & other.scripts.keys():
            script = min(one.scripts.keys() & other.scripts.keys())
            raise RegistryError(
                f"{one.name} brings the script {script!r}, which {other.name} brings too"
            )
        if one.tops & other.tops:
            raise RegistryError(
                f"{one.name} brings {min(one.tops & other.tops)!r}, which {other.name} brings "
                "too: one overwrites the other"
            )


def _check_scripts(wheel: Wheel, interpreter: TargetInterpreter) -> None:
    """Refuse scripts that would overwrite files of others in the interpreter's folder."""
    own = interpreter.installed.get(wheel.distribution)
    for script in wheel.scripts:
        others = [i for i in interpreter.installed.values() if script in i.scripts and i != own]
        if others:
            raise RegistryError(
                f"{wheel.name} brings the script {script!r}, which {others[0].name} "
                f"{others[0].version} has installed: one overwrites the other"
            )
        is_own = own is not None and script in own.scripts
        if not is_own and os.path.lexists(interpreter.bin / script):
            raise RegistryError(
                f"{wheel.name} brings the script {script!r}, and there is one of that name in "
                f"{interpreter.bin} already"
            )


def needed(requires: Iterable[Requirement], interpreter: TargetInterpreter) -> list[Requirement]:
    """Return the requirements that apply to an interpreter."""
    markers = dict(interpreter.markers)
    return [r for r in requires if r.marker is None or r.marker.evaluate(markers)]


def _with_registry_dependencies(
    client: RegistryClient, first: Release, interpreter: TargetInterpreter
) -> list[tuple[Release, Wheel]]:
    """Return the requested release and those that it needs from the registry, verified."""
    found = {first.distribution: (first, client.wheel(first))}
    waiting = [found[first.distribution][1]]
    while waiting:
        for requirement in needed(parsed_requires(waiting.pop().requires), interpreter):
            name = canonicalize_name(requirement.name)
            if name not in found and client.owner_of(name) is not None:
                release = client.find_distribution(name, requirement.specifier)
                found[name] = release, client.wheel(release)
                waiting.append(found[name][1])
    return list(found.values())


def _is_ours(entry: Any, paths: Sequence[Path]) -> bool:
    """Whether an entry of pip's report is one of the registry's wheels, given by path."""
    parts = urlsplit(entry["download_info"]["url"])
    local = Path(unquote(parts.path)) if parts.scheme == "file" else None
    return local is not None and bool(entry["is_direct"]) and local in paths


def _pinned(entry: Any) -> Pinned:
    metadata, download = entry["metadata"], entry["download_info"]
    name = canonicalize_name(metadata["name"])
    hashes = download.get("archive_info", {}).get("hashes", {})
    file = unquote(urlsplit(download["url"]).path).rpartition("/")[2]
    if entry["is_direct"] or not file.endswith(".whl"):
        raise RegistryError(f"{name} would come from {file!r}, which is not a wheel of your index")
    if "sha256" not in hashes:
        raise RegistryError(f"your index has no sha256 for {file}: it cannot be pinned")
    return Pinned(name, str(metadata["version"]), str(hashes["sha256"]), file)


def _present(
    wheels: Sequence[Wheel], interpreter: TargetInterpreter, coming: set[str]
) -> Iterable[tuple[str, str]]:
    """Yield the installed packages that the wheels require, directly or indirectly.

    Dependencies of RollArt itself are left out: its version covers them.
    """
    seen: set[str] = set()
    waiting = [requirement for wheel in wheels for requirement in parsed_requires(wheel.requires)]
    while waiting:
        for requirement in needed([waiting.pop()], interpreter):
            name = canonicalize_name(requirement.name)
            if name in seen or name not in interpreter.installed:
                continue
            seen.add(name)
            installed = interpreter.installed[name]
            if name not in coming:
                yield name, installed.version
            if name != CORE:
                waiting += _readable(installed.requires)


def _readable(requires: Sequence[str]) -> Iterable[Requirement]:
    """Yield requirements, without those of old packages that cannot be parsed."""
    for text in requires:
        with suppress(InvalidRequirement):
            yield Requirement(text)


def _replaced(interpreter: TargetInterpreter, coming: Sequence[Pinned | Release]) -> Iterable[str]:
    for new in coming:
        name = new.name if isinstance(new, Pinned) else new.distribution
        installed = interpreter.installed.get(name)
        if installed is not None and installed.version != new.version:
            yield f"{name} {installed.version}"
