"""Interpreters and installed packages of tasks, on the host.

Takes: the version of a Python, requirements and a date. Gives: a folder of packages for that
Python. Never: installs into the current environment, or downloads an interpreter.

uv installs the packages, because it can ignore releases after a date, and install for another
Python. It runs a package's build on the host: install only what you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from rollart_core.errors import UserError, first_line
from rollart_envs.swe.package import keep_only_metadata, project_names

_RELEASED: Final = {
    "3.8": "2019-10-14", "3.9": "2020-10-05", "3.10": "2021-10-04", "3.11": "2022-10-24",
    "3.12": "2023-10-02", "3.13": "2024-10-07", "3.14": "2025-10-07",
}  # fmt: skip
_YEAR_S: Final = 365 * 86400
_MANAGED: Final = (
    "~/.pyenv/versions/{version}.*/bin/python{version}",
    "~/.local/share/uv/python/cpython-{version}*/bin/python{version}",
)
_SYSTEM: Final = ("/usr", "/opt")
"""Folders that bubblewrap sandboxes have anyway."""
_NOT_COPIED: Final = frozenset(("test", "idlelib", "share", "include"))
_copying = threading.Lock()
_ASKED: Final = (
    "import json, os, sys; print(json.dumps([sys.version_info[:2], sys.base_prefix,"
    " os.path.realpath(sys.executable)]))"
)
_PINNED: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?===?[^;]+")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python of the host."""

    version: str
    path: Path
    home: Path
    """The folder with its standard library."""

    def placed(self, folder: Path) -> dict[str, object]:
        """Return the fields of a row that select it; it is copied into the folder of the tasks.

        The copy has no installed packages, among which the answer to a task can be. One of the
        system is not copied, because sandboxes have it anyway.
        """
        if any(self.home.is_relative_to(path) for path in _SYSTEM):
            return {"python": str(self.path)}
        name = f"pythons/{self.version}"
        with _copying:
            if not (folder / name).is_dir():
                part = folder / f"{name}.part"
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(self.home, part, symlinks=True, ignore=_left_out)
                # Sandboxes cannot write into it: they would compile each module at each start.
                command = (self.path, "-I", "-m", "compileall", "-q", str(part / "lib"))
                subprocess.run(command, capture_output=True, check=False)
                make_readable(part)
                part.rename(folder / name)
        return {"python": f"{name}/bin/{self.path.name}", "python_home": name}


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder of a Python that its copy does not need."""
    if Path(folder).name == "site-packages":
        return set(names)
    return {name for name in names if name in _NOT_COPIED or name.endswith(".a")}


@cache
def interpreter(version: str) -> Interpreter:
    """Return the Python of a version such as ``3.9``: on the PATH, of pyenv or of uv.

    Raises:
        UserError: If there is none.
    """
    named = shutil.which(f"python{version}")
    home = Path.home()
    found = [Path(named)] if named else []
    for pattern in _MANAGED:
        relative = pattern.format(version=version).removeprefix("~/")
        found += sorted(home.glob(relative), reverse=True)
    for path in (Path(sys.executable), *found):
        try:
            done = subprocess.run((path, "-I", "-c", _ASKED), capture_output=True, check=False)
            (major, minor), prefix, real = json.loads(done.stdout or b"[[0, 0], 0, 0]")
        except (OSError, ValueError):
            continue
        if f"{major}.{minor}" == version:
            return Interpreter(version, Path(real), Path(prefix))
    raise UserError(
        f"there is no python{version} on the PATH, of pyenv or of uv:"
        f" install it (uv python install {version})"
    )


def version_for(date: datetime) -> str:
    """Return the version of the newest Python here that was a year old at a date, or the oldest."""
    found = ""
    for version in sorted(_RELEASED, key=lambda text: int(text.partition(".")[2]), reverse=True):
        try:
            interpreter(version)
        except UserError:
            continue
        found = version
        if as_of(date, version) == date:
            break
    return found or f"{sys.version_info.major}.{sys.version_info.minor}"


def as_of(date: datetime, version: str) -> datetime:
    """Return the date of the packages for a Python: at least a year after its release.

    Older packages have no release that works with it.
    """
    released = _RELEASED.get(version)
    if released is None:
        return date
    usable = datetime.fromisoformat(released).replace(tzinfo=UTC).timestamp() + _YEAR_S
    return max(date, datetime.fromtimestamp(usable, UTC))


def install(
    site: Path,
    requirements: Sequence[str],
    *,
    python: Interpreter,
    before: datetime | None,
    env: Iterable[tuple[str, str]] = (),
) -> None:
    """Install requirements into a folder that is emptied first.

    Args:
        site: The folder.
        requirements: Requirements and paths of projects; pinned ones can be of any date.
        python: The Python that imports them.
        before: The date after which releases are ignored; None: now.
        env: Variables for the builds of packages.

    Raises:
        UserError: If they could not be installed; the message has the command and the reason.
    """
    command = ["pip", "install", "--target", site.name, "--python", str(python.path)]
    command += ["--compile-bytecode"]  # as pip does: warnings of a compilation are not the tests'
    if before is not None:
        command += ["--exclude-newer", before.strftime("%Y-%m-%dT%H:%M:%SZ")]
        pins = (_PINNED.fullmatch(line.strip()) for line in requirements)
        for name in sorted({pin[1] for pin in pins if pin}):
            command += ["--exclude-newer-package", f"{name}=2100-01-01"]
    shutil.rmtree(site, ignore_errors=True)
    site.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        (_uv(), "--quiet", *command, "--", *requirements),
        cwd=site.parent,
        env={**os.environ, **dict(env)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(site, ignore_errors=True)
        said = re.sub(r"[\s│├╰─▶×]+", " ", done.stderr).strip() or "it said nothing"
        told = " ".join(("uv pip install", *requirements))
        raise UserError(f"{first_line(told, 200)}: {first_line(said, 300)}")
    make_readable(site)


def install_project(
    site: Path,
    root: Path,
    requirements: Sequence[str],
    *,
    python: Interpreter,
    before: datetime | None,
    extras: Sequence[str] = (),
    name: str,
    version: str,
) -> None:
    """Install requirements, and those of a project, into a folder that is emptied first.

    The project's modules are removed, so that tests import those of the repository. Its metadata is
    kept, for programs that read their version.

    Args:
        site: The folder.
        root: The project; without ``setup.py`` and ``pyproject.toml`` it is not installed.
        requirements: More requirements; pinned ones can be of any date.
        python: The Python that imports them.
        before: The date after which releases are ignored; None: now.
        extras: Extras of the project.
        name: Name of the repository, for setuptools-scm.
        version: Its version, for setuptools-scm, which finds no history.

    Raises:
        UserError: If they could not be installed; the message has the command and the reason.
    """
    wanted = list(requirements)
    if any((root / file).is_file() for file in ("setup.py", "pyproject.toml")):
        _untag(root / "setup.cfg")
        wanted.insert(0, f"{root}[{','.join(extras)}]" if extras else str(root))
    names = [re.sub(r"-", "_", one).upper() for one in project_names(root, name)]
    env = [(f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{one}", version) for one in names]
    part = site.with_name(site.name + ".part")
    install(part, wanted, python=python, before=before, env=env)
    for found in list(distributions(path=[str(part)])):
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        if str(origin.get("url", "")).removeprefix("file://").rstrip("/") == str(root):
            keep_only_metadata(part, found.metadata["Name"])
    part.rename(site)


def _untag(config: Path) -> None:
    """Remove tags of development versions, of which old projects build invalid versions."""
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace")
        config.write_text(re.sub(r"(?m)^tag[_-](?:build|date)\b.*$", "", text), encoding="utf-8")


def make_readable(folder: Path) -> None:
    """Let all users read a folder: sandboxes can run as another user."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def _uv() -> str:
    try:
        import uv
    except ImportError:
        found = shutil.which("uv")
    else:
        found = uv.find_uv_bin()
    if found is None:
        raise UserError("the package uv is missing: pip install 'rollart[swe]'")
    return str(found)
