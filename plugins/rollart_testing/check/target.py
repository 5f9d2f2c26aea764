"""Resolve the target of a check: an id, a project folder or a wheel.

Takes: the target as typed. Gives: a :class:`Target`: distribution, entry points, and the folders
from which a child imports it. A project's metadata is written as if it were installed. Never:
imports it, runs a build backend, or writes into its folder.
"""

from __future__ import annotations

import shutil
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from rollart_core.contracts.adapter import SEPARATOR
from rollart_core.errors import PluginError, UnknownIdError, UserError, did_you_mean
from rollart_core.plugins import registry
from rollart_core.plugins.manager import CORE, GROUP, KINDS, Plugin, plugins

KINDLESS: Final = "?"
"""The kind of a ``module:Class``, before it is imported."""
_LICENCE_GLOBS: Final = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The subject of a check."""

    name: str
    """Its name in the report."""
    version: str = ""
    dist: Distribution | None = None
    """Its metadata; None if it has none."""
    entry_points: Sequence[tuple[str, str]] = ()
    """Name and value of each entry point in group ``rollart``."""
    paths: Sequence[Path] = ()
    """Folders at the front of a child's import path."""
    project: Path | None = None
    """The source folder, if a project folder was given."""
    ids: Sequence[tuple[str, str]] | None = None
    """(kind, id) of the checked plugins; None means all that its hooks return."""
    no_static: str = ""
    """Why there is nothing static to check; empty if there is."""

    @property
    def is_core(self) -> bool:
        """Whether it is a part of RollArt itself."""
        return self.dist is not None and self.dist.name == CORE

    @property
    def static_id(self) -> str:
        """The subject of its static results."""
        return self.dist.name if self.dist is not None else self.name


def open_target(given: str, scratch: Path) -> Target:
    """Resolve a target.

    Args:
        given: An id, alias, ``module:Class``, ``ADAPTER::FOREIGN_ID``, folder or wheel.
        scratch: An empty scratch folder.

    Raises:
        UserError: If it does not exist, or is neither a plugin project nor a wheel.
    """
    found = _registered(given)
    if found is not None:
        return found
    path = Path(given)
    if path.is_dir():
        return _of_dist(given, _laid_out(path, scratch), path.resolve())
    if path.is_file():
        return _of_dist(given, (_unpacked(path, scratch), [scratch]))
    return _unregistered(given)


def _registered(given: str) -> Target | None:
    """Return the target of an installed id or alias, working or broken."""
    for kind in KINDS:
        for registered in plugins().registered(kind).values():
            if given in {registered.key, getattr(registered.spec, "alias", None)}:
                return _of_plugin(given, registered.plugin, (kind, registered.key))
    for registered in plugins().broken_specs:
        if given in {registered.key, getattr(registered.spec, "alias", None)}:
            return _of_plugin(given, registered.plugin, (registered.kind, registered.key))
    return None


def _of_plugin(given: str, plugin: Plugin, of_kind: tuple[str, str]) -> Target:
    try:
        dist: Distribution | None = distribution(plugin.distribution)
    except (PackageNotFoundError, ValueError):
        dist = None
    entry_points = [(plugin.name, plugin.module)] if dist is None else _entry_points(dist)
    return Target(
        name=given,
        version=plugin.version,
        dist=dist,
        entry_points=entry_points,
        ids=[of_kind],
    )


def _of_dist(
    given: str, laid_out: tuple[Distribution, list[Path]], project: Path | None = None
) -> Target:
    dist, paths = laid_out
    return Target(
        name=dist.name or given,
        version=dist.version,
        dist=dist,
        entry_points=_entry_points(dist),
        paths=paths,
        project=project,
    )


def _entry_points(dist: Distribution) -> list[tuple[str, str]]:
    return [(e.name, e.value) for e in dist.entry_points if e.group == GROUP]


def _unpacked(wheel: Path, scratch: Path) -> Distribution:
    try:
        parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as e:
        raise UserError(f"{wheel}: give an id, a project folder or a wheel (*.whl): {e}") from e
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)  # extractall never writes outside the folder
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise UserError(f"{wheel}: cannot be read as a wheel: {e}") from e
    infos = [folder for folder in scratch.glob("*.dist-info") if (folder / "METADATA").is_file()]
    if len(infos) != 1:
        raise UserError(f"{wheel}: holds {len(infos)} folders *.dist-info with METADATA, not one")
    return Distribution.at(infos[0])


def _unregistered(given: str) -> Target:
    """Return the target of an adapter's id or of ``module:Class``; otherwise raise."""
    if SEPARATOR in given:
        registered = registry.find("environments", given)
        reason = f"a foreign environment, through the adapter of {registered.plugin}"
        return Target(name=given, ids=[("environments", given)], no_static=reason)
    if ":" in given:
        return Target(name=given, ids=[(KINDLESS, given)], no_static="no plugin registers it")
    if given.endswith(".whl"):
        raise UserError(f"{given}: there is no such file")
    known = [name for kind in KINDS for name in registry.names(kind)]
    for plugin in plugins().broken:
        if plugin.name == given:
            raise PluginError(f"plugin {plugin} is broken: {plugin.broken}")
    raise UnknownIdError(
        f"{given!r} is neither an installed id nor a folder nor a wheel."
        f"{did_you_mean(given, known)} `rollart list` shows what is installed."
    )


def _laid_out(folder: Path, scratch: Path) -> tuple[Distribution, list[Path]]:
    """Return the distribution of a project, and the folders that a child imports from.

    Args:
        folder: The project's.
        scratch: An empty folder for the metadata.

    Raises:
        UserError: If the folder holds no project.
    """
    folder = folder.resolve()
    pyproject = folder / "pyproject.toml"
    if not pyproject.is_file():
        raise UserError(
            f"{folder}: holds no pyproject.toml: give an id, a project folder or a wheel; "
            "`rollart new-env NAME` makes a project"
        )
    try:
        loaded = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{pyproject}: not TOML: {e}") from e
    project, roots = _table(loaded, "project"), _roots(folder, loaded)
    if not isinstance(project.get("name"), str):
        raise UserError(f"{pyproject}: has no [project] name; build a wheel and check that")
    if {"entry-points", "dependencies"} & set(project.get("dynamic", ())):
        return _installed(project["name"], folder), roots
    info = scratch / f"{canonicalize_name(project['name']).replace('-', '_')}-0.dist-info"
    info.mkdir()
    licences = _copy_licences(folder, project, info)
    lines = [*_metadata(project), *(f"License-File: {name}" for name in licences)]
    (info / "METADATA").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(_entry_points_text(project), encoding="utf-8")
    return Distribution.at(info), [scratch, *roots]


def _installed(name: str, folder: Path) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"{folder}: its dependencies or entry points are dynamic, which needs a build: "
            "install it (`pip install -e .`), or build a wheel and check that"
        ) from None


def _roots(folder: Path, loaded: Mapping[str, Any]) -> list[Path]:
    """Return the folders of its packages: from setuptools' settings, ``src``, or the folder itself.

    Folders without a hook module are left out, so that their files do not shadow other modules.
    """
    setuptools = _table(loaded, "tool", "setuptools")
    where = _table(setuptools, "packages", "find").get("where", [])
    named = [*where, _table(setuptools, "package-dir").get("", "."), "src", "."]
    roots = [root for name in dict.fromkeys(named) if (root := (folder / name).resolve()).is_dir()]
    hooks = _table(loaded, "project", "entry-points", GROUP).values()
    tops = {str(value).partition(":")[0].partition(".")[0] for value in hooks}
    holding = [r for r in roots if any((r / t).is_dir() or (r / f"{t}.py").is_file() for t in tops)]
    return list(dict.fromkeys(holding or roots))


def _table(loaded: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the table under ``keys``; an empty one if the value is not a table."""
    found: Any = loaded
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _metadata(project: Mapping[str, Any]) -> Iterator[str]:
    yield "Metadata-Version: 2.4"
    yield f"Name: {project['name']}"
    yield f"Version: {project.get('version', '0+dynamic')}"
    licence = project.get("license")
    if isinstance(licence, str):
        yield f"License-Expression: {licence}"
    elif isinstance(licence, dict) and isinstance(licence.get("text"), str):
        yield f"License: {licence['text'].splitlines()[0] if licence['text'] else ''}"
    for requirement in project.get("dependencies", ()):
        yield f"Requires-Dist: {requirement}"
    for extra, requirements in _table(project, "optional-dependencies").items():
        yield f"Provides-Extra: {extra}"
        for requirement in requirements:
            wanted, _, marker = requirement.partition(";")
            both = f"({marker.strip()}) and " if marker else ""
            yield f'Requires-Dist: {wanted.strip()} ; {both}extra == "{extra}"'


def _entry_points_text(project: Mapping[str, Any]) -> str:
    named = _table(project, "entry-points", GROUP)
    return "\n".join([f"[{GROUP}]", *(f"{name} = {value}" for name, value in named.items())])


def _copy_licences(folder: Path, project: Mapping[str, Any], info: Path) -> list[str]:
    """Copy the licence files as a build does, and return their names."""
    licence = project.get("license")
    named = [licence["file"]] if isinstance(licence, dict) and "file" in licence else []
    globs = project.get("license-files", _LICENCE_GLOBS)
    found = {path for glob in (*named, *globs) for path in folder.glob(glob) if path.is_file()}
    names = sorted(str(path.relative_to(folder)) for path in found)
    for name in names:
        target = info / "licenses" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, target)
    return names
