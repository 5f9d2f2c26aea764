"""Packages to make tasks from: fetched by pip, or from a folder, an sdist or a wheel.

Takes: a name or path. Gives: :class:`Package` with its tree unpacked and its requirements installed
in a separate folder. Never: installs anything into the current environment.

pip runs a package's build to find its requirements: fetch only packages that you would install.
"""

from __future__ import annotations

import configparser
import contextlib
import email.parser
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rollart_core.errors import UserError, first_line

TEST_EXTRAS: Final = ("test", "tests", "testing")
_SKIPPED: Final = shutil.ignore_patterns(
    *(".git", ".hg", ".venv", "venv", ".tox", ".nox", "__pycache__", "*.pyc", "node_modules"),
    *("build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".eggs"),
)
_METADATA: Final = ("PKG-INFO", "METADATA")
_VERSION_FILE: Final = re.compile(
    r"""["']?(?:write_to|version_file|version-file)["']?\s*[=:]\s*["']([\w./-]+\.py)["']"""
)
"""Where setuptools-scm and hatch-vcs write the version of a project when it is built."""


@dataclass(frozen=True, slots=True)
class Package:
    """An unpacked package."""

    name: str
    version: str
    root: Path
    """Its source tree."""

    @property
    def slug(self) -> str:
        """A name for files and ids."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.name}-{self.version}").strip("-.")


def fetch(named: str, folder: Path) -> Path:
    """Return the given folder, sdist or wheel; pip fetches it if it is not a path.

    Args:
        named: A path, or a pip requirement: ``toolz``, ``toolz==1.0.0``.
        folder: The folder for downloads.

    Raises:
        UserError: If it does not exist, or has no sdist.
    """
    path = Path(named).expanduser()
    if path.exists():
        return path
    if "/" in named or named.endswith((".whl", ".tar.gz", ".zip")):
        raise UserError(f"{named}: there is no such file or folder")
    if not re.match(r"[A-Za-z0-9]", named):
        raise UserError(f"{named!r} is neither a path nor the name of a package")
    folder.mkdir(parents=True, exist_ok=True)
    bare = re.split(r"[\[<>=!~; ]", named, maxsplit=1)[0]
    pip(
        *("download", "--no-deps", "--no-binary", bare, "--dest", str(folder), "--", named),
        what=f"{named}: pip could not fetch an sdist",
    )
    found = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    if not found:
        raise UserError(f"{named}: pip fetched nothing")
    return found[-1]


def unpack(source: Path, folder: Path) -> Package:
    """Return the package in a folder, sdist or wheel, with its tree copied below ``folder``.

    Raises:
        UserError: If it is none of these, or has no name and version.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        root = _unpacked(source, folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{source}: cannot be unpacked: {first_line(str(error))}") from None
    name, version = _name_and_version(root, source)
    return Package(canonicalize_name(name), version, root)


def install(
    source: Path, package: Package, site: Path, *, requires: Sequence[str] = (), notes: list[str]
) -> None:
    """Install pytest and the requirements of a package and its tests into ``site``.

    The package itself is not installed, only its metadata, for programs that read their version.

    Args:
        source: The folder, sdist or wheel.
        package: The same, unpacked.
        site: The folder; emptied first.
        requires: Additional requirements.
        notes: Receives notes for the user.

    Raises:
        UserError: If pip could not install them.
    """
    wanted, extras = test_requirements(package.root)
    told = source.resolve()
    with_extras = f"{told}[{','.join(extras)}]" if extras else str(told)
    what = f"{package.name}: pip could not install what it needs"
    try:
        install_into(site, [with_extras, *wanted, *requires], what=what)
    except UserError as error:
        if not extras and not wanted:
            raise
        notes.append(f"test requirements could not be installed and are left out: {error}")
        install_into(site, [str(told), *requires], what=what)
    keep_only_metadata(site, package.name)


def install_into(site: Path, requirements: Iterable[str], *, what: str) -> None:
    """Install requirements, and pytest, into a folder that is emptied first."""
    shutil.rmtree(site, ignore_errors=True)
    site.parent.mkdir(parents=True, exist_ok=True)
    pip("install", "--target", str(site), "--", "pytest", *requirements, what=what)
    # Sandboxes can run as another user, so all users must be able to read their bind mounts.
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def test_requirements(root: Path) -> tuple[list[str], list[str]]:
    """Return the test requirements of a project: those of its test groups, and its test extras."""
    project, groups = _pyproject(root)
    extras: list[str] = []
    for metadata in (root / name for name in _METADATA):
        if metadata.is_file():
            extras = _headers(metadata).get_all("Provides-Extra") or []
    optional = project.get("optional-dependencies")
    if not extras and isinstance(optional, Mapping):
        extras = [str(extra) for extra in optional]
    wanted = []
    for group in TEST_EXTRAS:
        listed = groups.get(group)
        if isinstance(listed, list):
            wanted += [str(line) for line in listed if isinstance(line, str)]
    return wanted, [extra for extra in extras if extra in TEST_EXTRAS][:1]


test_requirements.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def project_requirements(root: Path) -> list[str]:
    """Return the requirements of a project and its tests, from pyproject.toml or setup.cfg."""
    project, _ = _pyproject(root)
    wanted, extras = test_requirements(root)
    optional = project.get("optional-dependencies")
    listed = project.get("dependencies")
    config = configparser.ConfigParser(interpolation=None, strict=False)
    with contextlib.suppress(configparser.Error, OSError, UnicodeError):
        config.read(root / "setup.cfg", encoding="utf-8")
    old = config.get("options", "install_requires", fallback="")
    needed = [str(line) for line in listed] if isinstance(listed, list) else _lines(old)
    if isinstance(optional, Mapping):
        for extra in extras:
            needed += [str(line) for line in optional.get(extra, ())]
    return [*needed, *wanted]


def version_files(read: Callable[[str], bytes | None], version: str) -> dict[str, bytes]:
    """Return the modules that a build writes from the history, which a tree does not have.

    Args:
        read: Returns a file of the tree; None if it does not exist.
        version: The version to write.
    """
    numbers = ", ".join(re.findall(r"\d+", version)[:3])
    content = (
        f"version = __version__ = {version!r}\nversion_tuple = __version_tuple__ = ({numbers},)\n"
    )
    texts = [read(name) or b"" for name in ("pyproject.toml", "setup.py")]
    paths = dict.fromkeys(
        path for text in texts for path in _VERSION_FILE.findall(text.decode("utf-8", "replace"))
    )
    inside = [path for path in paths if not path.startswith("/") and ".." not in path.split("/")]
    return {path: content.encode() for path in inside if read(path) is None}


def version_commands(files: Mapping[str, bytes]) -> list[str]:
    """Return the shell commands that write files of :func:`version_files`."""
    return [
        f"printf %s {shlex.quote(content.decode())} > {shlex.quote(path)}"
        for path, content in files.items()
    ]


def _lines(text: str) -> list[str]:
    """Return the lines of a value in setup.cfg, without comments."""
    lines = (line.split(" #", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"(?!file:)[A-Za-z0-9]", line)]


def project_names(root: Path, name: str) -> set[str]:
    """Return the names under which a project can be installed: its own, and that of its folder."""
    project, _ = _pyproject(root)
    found = {name, str(project.get("name") or name)}
    for file in ("setup.cfg", "setup.py"):
        if (root / file).is_file():
            text = (root / file).read_text(encoding="utf-8", errors="replace")
            found |= set(re.findall(r"""^\s*name\s*=\s*['"]?([A-Za-z0-9._-]+)""", text, re.M)[:1])
    return {canonicalize_name(one) for one in found}


def requirement_lines(path: Path) -> Iterator[str]:
    """Yield the requirements in a file and in those that it includes; none if it does not exist.

    Options, paths and addresses are ignored.
    """
    if not path.is_file():
        return
    for raw in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = raw.split(" #", 1)[0].split(" --", 1)[0].strip().rstrip("\\").strip()
        if included := re.match(r"(?:-r|--requirement)[ =]*(\S+)", line):
            yield from requirement_lines(path.parent / included[1])
        elif re.match(r"[A-Za-z0-9]", line) and "://" not in line:
            yield line


def agrees(requirement: str, others: Sequence[str]) -> bool:
    """Return whether others allow the version of a pinned requirement; others are ignored."""
    pin = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[.*\])?\s*==\s*([\w.]+)", requirement.strip())
    if pin is None:
        return True
    same = [one for one in others if name_of(one) == canonicalize_name(pin[1])]
    try:
        return all(Requirement(one).specifier.contains(pin[2], prereleases=True) for one in same)
    except InvalidRequirement:  # of an old project; the installer decides
        return True


def name_of(requirement: str) -> str:
    """Return the normalized name of the package of a requirement."""
    return canonicalize_name(re.split(r"[\[<>=!~; @]", requirement.strip(), maxsplit=1)[0])


def pip(*arguments: str, what: str) -> None:
    """Run pip quietly.

    Raises:
        UserError: If it failed; the message starts with ``what`` and ends with pip's output.
    """
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    done = subprocess.run((*command, *arguments), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{what}: {_reason(done.stderr)}")


def _reason(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["pip said nothing"]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    if errors and errors[-1] != "ERROR: Exception:":  # else the last line is the reason
        lines = errors
    return first_line(lines[-1].removeprefix("ERROR: "))


def _unpacked(source: Path, folder: Path) -> Path:
    if source.is_dir():
        root = folder / source.resolve().name
        shutil.copytree(source, root, ignore=_SKIPPED, symlinks=True)
        return root
    folder.mkdir(parents=True)
    if source.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(source) as archive:
            archive.extractall(folder)
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as tar:
            tar.extractall(folder, filter="data")
    else:
        raise UserError(f"{source}: is not a folder, sdist (.tar.gz, .zip) or wheel (.whl)")
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _name_and_version(root: Path, source: Path) -> tuple[str, str]:
    files = [root / name for name in _METADATA]
    files += sorted(root.glob("*.dist-info/METADATA")) + sorted(root.glob("*.egg-info/PKG-INFO"))
    for path in files:
        if path.is_file():
            headers = _headers(path)
            if headers["Name"] and headers["Version"]:
                return str(headers["Name"]), str(headers["Version"])
    project, _ = _pyproject(root)
    if isinstance(project.get("name"), str):
        return str(project["name"]), str(project.get("version") or "0")
    raise UserError(
        f"{source}: has no name: there is no PKG-INFO, METADATA or pyproject.toml with a name"
    )


def _headers(path: Path) -> email.message.Message:
    text = path.read_text(encoding="utf-8", errors="replace")
    return email.parser.HeaderParser().parsestr(text)


def _pyproject(root: Path) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the tables ``project`` and ``dependency-groups``."""
    try:
        loaded = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}, {}
    tables = [loaded.get(name) for name in ("project", "dependency-groups")]
    project, groups = (table if isinstance(table, dict) else {} for table in tables)
    return project, groups


def keep_only_metadata(site: Path, name: str) -> None:
    """Remove an installed package's modules, so that tests import those of the tree."""
    for found in distributions(path=[str(site)]):
        if canonicalize_name(found.metadata["Name"]) == name:
            _remove_modules(site, found)


def _remove_modules(site: Path, installed: Distribution) -> None:
    for file in installed.files or ():
        path = (site / str(file)).resolve()
        if path.is_relative_to(site.resolve()) and ".dist-info" not in str(file):
            path.unlink(missing_ok=True)
    for folder in sorted(site.rglob("*"), reverse=True):
        if folder.is_dir() and folder.name != "__pycache__" and _is_bare(folder):
            shutil.rmtree(folder)


def _is_bare(folder: Path) -> bool:
    return all(path.name == "__pycache__" for path in folder.iterdir())
