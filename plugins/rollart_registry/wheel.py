"""Read a wheel's content from its archive without importing or installing anything.

Takes: a wheel file. Gives: :class:`Wheel`, or a :class:`RegistryError` for a wheel that does more
than add files of its own packages to site-packages. Never: runs code of the wheel.

:func:`wheel_of` builds the wheel of a project, in a copy of it, because an old ``build/`` folder of
the project would get into the wheel. It never downloads a build backend.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from rollart_core.errors import RegistryError, UserError, first_line
from rollart_core.plugins.manifest import Manifest, read_wheel_manifests

MAX_WHEEL_BYTES: Final = 512 * 2**20
MAX_UNPACKED_BYTES: Final = 4 * 2**30
_METADATA_FILE_BYTES: Final = 4 * 2**20
_FAULTS: Final = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    KeyError,
    RuntimeError,
    EOFError,
    ValueError,
    csv.Error,
    zlib.error,
)
"""Errors of reading a damaged, encrypted or forged archive."""
_RUN_AT_START: Final = frozenset({"sitecustomize", "usercustomize"})
_SCRIPTS: Final = ("console_scripts", "gui_scripts")
_SCRIPT_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_RESERVED: Final = re.compile(
    r"(pythonw?|pypy|pip|easy_install|(de)?activate|rollart)[-0-9.]*(config|exe|csh|fish|nu|ps1|py)?",
    re.IGNORECASE,
)
"""Scripts of every virtual environment; pip also writes ``pip3`` for a script ``pip``."""

EntryPoints = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that may be published or installed."""

    path: Path
    distribution: str
    """Its canonical name, such as ``acme-maze``."""
    version: str
    sha256: str
    length_bytes: int
    requires: tuple[str, ...]
    requires_python: str
    licence: str
    summary: str
    entry_points: EntryPoints
    """(group, name, value), sorted."""
    files: Mapping[str, str]
    """Path in the archive -> sha256 (hex), of every file but RECORD."""
    manifests: Mapping[str, Manifest]
    """Import package -> its ``rollart.yaml``."""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def packages(self) -> frozenset[str]:
        """The top-level folders that it adds to site-packages."""
        return frozenset(top for path in self.files if (top := path.split("/")[0]) and "/" in path)

    @property
    def scripts(self) -> dict[str, str]:
        """The scripts that pip writes for it: name -> function."""
        return {name: value for group, name, value in self.entry_points if group in _SCRIPTS}

    @property
    def tops(self) -> frozenset[str]:
        """The names of its top-level packages and modules."""
        return frozenset(_top(path) for path in self.files) - {""}


def read_wheel(path: Path) -> Wheel:
    """Read and check a wheel.

    Raises:
        RegistryError: If it is refused; gives the file's name and the fault.
    """
    try:
        distribution, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        message = f"{path.name} is not a wheel file name such as acme_maze-1.0.0-py3-none-any.whl"
        raise RegistryError(message) from None
    try:
        length = path.stat().st_size
        if length > MAX_WHEEL_BYTES:
            raise RegistryError(f"{path.name} is larger than {MAX_WHEEL_BYTES:,} bytes")
        with zipfile.ZipFile(path) as archive:
            files = _checked_files(path.name, archive)
            metadata, entry_points = _dist_info(path.name, archive)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        manifests = read_wheel_manifests(path)
    except RegistryError:
        raise
    except UserError as e:
        raise RegistryError("; ".join(str(e).splitlines())) from e
    except OSError as e:
        raise RegistryError(f"cannot read {path}: {e.strerror}") from e
    except _FAULTS as e:
        raise RegistryError(f"{path.name} is not a complete wheel: {first_line(str(e))}") from e
    inside = canonicalize_name(str(metadata["Name"])), str(metadata["Version"])
    if inside != (distribution, str(version)):
        raise RegistryError(f"{path.name} is {' '.join(inside)} by its METADATA")
    requires = tuple(metadata.get_all("Requires-Dist") or ())
    _check_requires(path.name, requires)
    _check_scripts(path.name, entry_points)
    return Wheel(
        path=path,
        distribution=distribution,
        version=str(version),
        sha256=sha256,
        length_bytes=length,
        requires=requires,
        requires_python=str(metadata["Requires-Python"] or ""),
        licence=str(metadata["License-Expression"] or metadata["License"] or "").split("\n")[0],
        summary=" ".join(str(metadata["Summary"] or "").split()),
        entry_points=entry_points,
        files=files,
        manifests=manifests,
    )


def parsed_requires(requires: tuple[str, ...]) -> list[Requirement]:
    """Return requirements that :func:`read_wheel` has checked."""
    return [Requirement(text) for text in requires]


def _checked_files(name: str, archive: zipfile.ZipFile) -> dict[str, str]:
    """Check every member's path and its hash against RECORD; return path -> sha256 (hex)."""
    members = archive.infolist()
    if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
        raise RegistryError(f"{name} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
    paths = [member.filename for member in members if not member.is_dir()]
    if len(set(paths)) != len(paths):
        raise RegistryError(f"{name} holds a path twice")
    for member in members:
        _check_member(name, member)
    record = _single(name, paths, "RECORD")
    _check_one_distribution(name, archive.namelist(), record.split("/")[0])
    expected = dict(_record_hashes(name, archive, record))
    signatures = {record, f"{record}.jws", f"{record}.p7s"}
    files = {path: _hash(archive, path) for path in paths if path not in signatures}
    if files != {path: expected.get(path) for path in files}:
        wrong = next(path for path in files if files[path] != expected.get(path))
        raise RegistryError(f"{name}: {wrong} is not what the wheel's RECORD says")
    return files


def _top(path: str) -> str:
    """Return the top-level import name of a file in site-packages; empty if it has none."""
    top, inside, _ = path.partition("/")
    if top == "__pycache__" or top.endswith(".dist-info"):
        return ""
    return top if inside else top.partition(".")[0]


def _check_member(name: str, member: zipfile.ZipInfo) -> None:
    path = member.filename
    pure = PurePosixPath(path)
    if not pure.parts or str(pure) != path.removesuffix("/"):
        raise RegistryError(f"{name} holds {path!r}, which is not a plain path")
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise RegistryError(f"{name} holds {path!r}, which uses an unsupported compression")
    outside = pure.is_absolute() or ".." in pure.parts or "\\" in path or ":" in pure.parts[0]
    if outside or stat.S_ISLNK(member.external_attr >> 16):
        raise RegistryError(f"{name} holds {path!r}, which leads out of its own folder")
    top = pure.parts[0]
    if top.endswith(".data"):
        raise RegistryError(f"{name} holds {path!r}: files outside of packages are not allowed")
    starts = len(pure.parts) == 1 and path.endswith(".pth")
    if starts or top.partition(".")[0] in _RUN_AT_START:
        raise RegistryError(f"{name} holds {path!r}, which would run whenever Python starts")
    if top.split(".")[0].startswith("rollart_") and not top.endswith(".dist-info"):
        raise RegistryError(f"{name} holds {path!r}: packages rollart_* are reserved for RollArt")


def _check_one_distribution(name: str, paths: list[str], own: str) -> None:
    """Refuse metadata of a second distribution, whose entry points would not be shown."""
    for path in paths:
        top = path.split("/")[0]
        if top != own and top.lower().endswith((".dist-info", ".egg-info", ".egg")):
            raise RegistryError(f"{name} holds {path!r}: a wheel must hold one distribution")


def _single(name: str, paths: list[str], wanted: str) -> str:
    found = [p for p in paths if p.endswith(f".dist-info/{wanted}") and p.count("/") == 1]
    if len(found) != 1:
        raise RegistryError(f"{name} holds {len(found)} {wanted} files; a wheel must hold one")
    return found[0]


def _record_hashes(name: str, archive: zipfile.ZipFile, record: str) -> Iterator[tuple[str, str]]:
    for row in csv.reader(io.StringIO(_text(name, archive, record))):
        if len(row) >= 2 and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            yield row[0], base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()


def _hash(archive: zipfile.ZipFile, path: str) -> str:
    with archive.open(path) as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _dist_info(
    name: str, archive: zipfile.ZipFile
) -> tuple[Message, tuple[tuple[str, str, str], ...]]:
    paths = archive.namelist()
    metadata_path = _single(name, paths, "METADATA")
    metadata = Parser().parsestr(_text(name, archive, metadata_path), headersonly=True)
    entry_points_path = metadata_path.replace("/METADATA", "/entry_points.txt")
    if entry_points_path not in paths:
        return metadata, ()
    text = _text(name, archive, entry_points_path)
    try:
        rows = sorted((e.group, e.name, e.value) for e in _EntryPointsOnly(text).entry_points)
    except (TypeError, ValueError) as e:
        reason = first_line(str(e))
        raise RegistryError(f"{name}: its entry_points.txt cannot be read: {reason}") from e
    return metadata, tuple(rows)


class _EntryPointsOnly(Distribution):
    """Parses entry points as Python does once they are installed, so what is shown is what runs."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "entry_points.txt" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


def _text(name: str, archive: zipfile.ZipFile, path: str) -> str:
    if archive.getinfo(path).file_size > _METADATA_FILE_BYTES:
        raise RegistryError(f"{name}: {path} is larger than {_METADATA_FILE_BYTES:,} bytes")
    return archive.read(path).decode("utf-8")


def _check_requires(name: str, requires: tuple[str, ...]) -> None:
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as e:
            reason = first_line(str(e))
            raise RegistryError(f"{name} requires {text!r}, which cannot be read: {reason}") from e
        if requirement.url:
            raise RegistryError(
                f"{name} requires {text!r}: a dependency comes from the user's index, "
                "never from an address"
            )


def _check_scripts(name: str, entry_points: EntryPoints) -> None:
    for group, script, _ in entry_points:
        if group not in _SCRIPTS:
            continue
        if not _SCRIPT_NAME.fullmatch(script):
            raise RegistryError(f"{name} has the script {script!r}, which is not a plain file name")
        if _RESERVED.fullmatch(script):
            raise RegistryError(f"{name} has the reserved script name {script!r}")


_LEFT_OUT: Final = (".*", "build", "dist", "*.egg-info", "venv", "runs")


def wheel_of(path: Path, work: Path) -> Path:
    """Return the wheel at ``path``, built if it is a project.

    Args:
        path: A ``.whl`` file or a folder with a ``pyproject.toml``.
        work: An empty folder to build in.

    Raises:
        RegistryError: If it is neither, or cannot be built.
    """
    if path.is_file() and path.suffix == ".whl":
        return path
    if not (path / "pyproject.toml").is_file():
        raise RegistryError(f"{path} is neither a wheel nor a folder with a pyproject.toml")
    source, out = work / "project", work / "dist"
    shutil.copytree(path, source, ignore=partial(_ignored, str(path)))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
    built = sorted(out.glob("*.whl"))
    if done.returncode or len(built) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line.strip() for line in reversed(lines) if "rror" in line), "")
        raise RegistryError(
            f"{path} cannot be built here ({said or 'pip wheel failed'}): install its build "
            "backend, or build it with `python -m build --wheel` and give the wheel"
        )
    return built[0]


def _ignored(project: str, folder: str, names: list[str]) -> set[str]:
    """Return what is not copied: at the top what builds and tools leave, anywhere bytecode."""
    patterns = ("__pycache__", *(_LEFT_OUT if folder == project else ()))
    return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
