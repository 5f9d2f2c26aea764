"""A project folder as if it were installed: its metadata laid out beside it, nothing built.

Takes: a folder with ``pyproject.toml``. Gives: a distribution made from ``[project]``, and the
folders to import from. Never: runs a build backend, or writes into the project.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from rollart_core.errors import UserError
from rollart_core.plugins.manager import GROUP

_LICENCE_GLOBS = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")


def lay_out(folder: Path, scratch: Path) -> tuple[Distribution, list[Path]]:
    """Return the distribution of a project, and the folders that a child imports from.

    Args:
        folder: The project's.
        scratch: An empty folder, which gets the metadata.

    Raises:
        UserError: When the folder holds no project.
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
    (info / "entry_points.txt").write_text(_entry_points(project), encoding="utf-8")
    return Distribution.at(info), [scratch, *roots]


def _installed(name: str, folder: Path) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"{folder}: its dependencies or entry points are dynamic, which only a build tells: "
            "install it (`pip install -e .`), or build a wheel and check that"
        ) from None


def _roots(folder: Path, loaded: Mapping[str, Any]) -> list[Path]:
    """Return where its packages lie: setuptools' own words, ``src``, or the folder itself.

    Folders without a hook module are left out: what else lies there must shadow nothing.
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
    """Return the table under ``keys``; an empty one where there is something else."""
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


def _entry_points(project: Mapping[str, Any]) -> str:
    named = _table(project, "entry-points", GROUP)
    return "\n".join([f"[{GROUP}]", *(f"{name} = {value}" for name, value in named.items())])


def _copy_licences(folder: Path, project: Mapping[str, Any], info: Path) -> list[str]:
    """Copy the licence files, as a build would, and return their names."""
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
