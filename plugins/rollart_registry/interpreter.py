"""The Python interpreter that packages are installed into, and its pip.

Takes: the path of an interpreter. Gives: its installed distributions, pip's resolution, an
installation with hashes. Never: imports installed packages, builds a source distribution (that
would run its code), or adds an index to those that the user has configured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from packaging.utils import canonicalize_name

from rollart_core.errors import RegistryError, first_line

_WHEELS_ONLY: Final = ("--only-binary", ":all:")
_ASK: Final = """
import importlib.metadata as m, importlib.util as u, json, os, platform, sys, sysconfig
bin = os.path.abspath(sysconfig.get_path('scripts'))
found = []
for d in m.distributions():
    head = d.metadata
    if head['Name']:
        rows = [r.split(',')[0].strip('"') for r in (d.read_text('RECORD') or '').splitlines()]
        plain = [r for r in rows if r and r[0] not in './']
        tops = {r.split('/')[0] if '/' in r else r.split('.')[0] for r in plain}
        tops = {top for top in tops if top != '__pycache__' and not top.endswith('.dist-info')}
        record = [r for r in rows if r.endswith('.dist-info/RECORD') and r.count('/') == 1]
        outside = [os.path.abspath(str(d.locate_file(r))) for r in rows if r and r[0] in './']
        scripts = [os.path.basename(path) for path in outside if os.path.dirname(path) == bin]
        found.append([head['Name'], head['Version'], head.get_all('Requires-Dist') or [],
                      str(d.locate_file('')), sorted(tops), (record or [''])[0], scripts])
full = platform.python_version()
markers = dict(
    implementation_name=sys.implementation.name, implementation_version=full, os_name=os.name,
    platform_machine=platform.machine(), platform_release=platform.release(),
    platform_system=platform.system(), platform_version=platform.version(),
    python_full_version=full,
    platform_python_implementation=platform.python_implementation(), sys_platform=sys.platform,
    python_version='.'.join(platform.python_version_tuple()[:2]), extra='')
print(json.dumps([found, markers, u.find_spec('pip') is not None, bin]))
"""
"""The script that the interpreter runs; it uses only the standard library."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed distribution."""

    name: str
    """Canonical."""
    version: str
    requires: tuple[str, ...]
    location: Path
    """The site-packages folder it is in."""
    tops: frozenset[str]
    """The names of its top-level packages and modules in that folder."""
    record: str
    """The path of its RECORD, relative to that folder; empty if it has none."""
    scripts: frozenset[str] = frozenset()
    """The names of the scripts in its RECORD."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One distribution from the user's index, with the hash of the wheel that pip chose."""

    name: str
    version: str
    sha256: str
    file: str


@dataclass(frozen=True, slots=True)
class TargetInterpreter:
    """An interpreter, inspected once; :meth:`again` inspects it again."""

    python: str
    installed: Mapping[str, Installed]
    markers: Mapping[str, str]
    has_pip: bool
    bin: Path
    """The folder of its scripts."""

    @classmethod
    def at(cls, python: str | Path | None = None) -> TargetInterpreter:
        """Inspect an interpreter.

        Args:
            python: Its path; None means the current interpreter.

        Raises:
            RegistryError: If it cannot be run.
        """
        given = str(python or sys.executable)
        # Not resolved: the Python of a virtual environment is a link to another one.
        path = os.path.abspath(shutil.which(given) or given)
        try:
            with TemporaryDirectory() as folder:
                command = [path, "-c", _ASK]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, cwd=folder
                )
            found, markers, has_pip, bin_folder = json.loads(done.stdout)
        except (OSError, subprocess.CalledProcessError, ValueError) as e:
            raise RegistryError(f"{given} cannot be run as Python: {first_line(str(e))}") from e
        # Iterate from the end, because the first one on the path is in use.
        rows = [
            Installed(
                canonicalize_name(n), v, tuple(r), Path(at), frozenset(top), record, frozenset(own)
            )
            for n, v, r, at, top, record, own in reversed(found)
        ]
        return cls(path, {row.name: row for row in rows}, markers, has_pip, Path(bin_folder))

    def again(self) -> TargetInterpreter:
        """Return the same interpreter, inspected again."""
        return TargetInterpreter.at(self.python)

    def resolve(self, wheels: Sequence[Path], *, everything: bool) -> tuple[list[Any], str]:
        """Resolve the requirements of these wheels with pip, and install nothing.

        Args:
            wheels: Local files.
            everything: Also resolve installed packages, so that all packages get a hash.

        Returns:
            The entries of pip's report, and pip's version.

        Raises:
            RegistryError: If pip finds no solution.
        """
        with TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = ["--dry-run", "--quiet", "--report", str(report), *_WHEELS_ONLY]
            options += ["--ignore-installed"] if everything else []
            self._pip("install", *options, *map(str, wheels))
            found = json.loads(report.read_text("utf-8"))
        return found["install"], str(found["pip_version"])

    def install(self, wheels: Mapping[Path, str], pinned: Sequence[Pinned]) -> None:
        """Install local wheels (path -> sha256), and pinned ones from the user's index.

        pip fetches everything and compares every hash before it installs the first.

        Raises:
            RegistryError: If pip fails; holds pip's message.
        """
        lines = [
            f"{path.name.split('-')[0]} @ {path.resolve().as_uri()} --hash=sha256:{sha256}"
            for path, sha256 in wheels.items()
        ]
        lines += [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in pinned]
        with TemporaryDirectory() as folder:
            requirements = Path(folder) / "requirements.txt"
            requirements.write_text("\n".join(lines) + "\n", "utf-8")
            options = ["--require-hashes", "--no-deps", "--force-reinstall", "--quiet"]
            self._pip("install", *options, *_WHEELS_ONLY, "-r", str(requirements))

    def _pip(self, *arguments: str) -> None:
        pip = [self.python, "-m", "pip"]
        if not self.has_pip:
            pip = [sys.executable, "-m", "pip", "--python", self.python]
        command = [*pip, "--disable-pip-version-check", "--no-input", *arguments]
        with TemporaryDirectory() as folder:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise RegistryError(f"pip: {_said(done.stderr) or f'exit code {done.returncode}'}")


def _said(stderr: str) -> str:
    """Return pip's error messages in one line."""
    errors = [line[7:].strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    if not errors:
        errors = [line.strip() for line in stderr.splitlines() if line.strip()][-1:]
    return first_line("; ".join(errors), 500)
