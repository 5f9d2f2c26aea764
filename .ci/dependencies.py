#!/usr/bin/env python3
"""Virtual environments and wheels from a cache outside the clone.

    python3 .ci/dependencies.py venv .venv torch==2.13.0 --extra train --extra dev
    python3 .ci/dependencies.py wheels .wheelhouse pytest pip --extra serverless

An environment is built once for each set of requirements, Python and machine type, under
``ROLLART_CACHE`` (default: ``rollart`` in the user's cache folder). Each clone then gets a copy
whose files are hard links, in seconds, and installs its own code into it. A build takes a lock, and
is renamed when it is complete, so that several clones may ask at once. An environment that exists
already is updated in place by pip; the cache does not change.

Entries that no clone has asked for in 30 days are removed by the next build. Deleting the whole
cache is safe at any time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = ".origin"
"""The file of an entry that holds the path it was built at, which its scripts name."""
KEPT_DAYS = 30
FORMAT = 1
"""Part of each key: one more whenever entries are built in another way."""


def cache_folder() -> Path:
    """Return where dependencies and lane stamps are kept."""
    if given := os.environ.get("ROLLART_CACHE"):
        return Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "rollart"


def interpreter() -> list[str]:
    """Return what a build depends on besides its requirements."""
    return [platform.python_implementation(), platform.python_version(), sysconfig.get_platform()]


def key_of(kind: str, *parts: object) -> str:
    """Return the name of an entry: its kind, and a hash of all that it is built from."""
    told = json.dumps([FORMAT, kind, *interpreter(), *parts])
    return f"{kind}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def requirements_of(root: Path, extras: Sequence[str], *, base: bool) -> list[str]:
    """Return what pyproject.toml asks for.

    Args:
        root: The folder of pyproject.toml.
        extras: Names of optional dependencies.
        base: Whether the package itself is wanted: what it needs, and what builds it.

    Raises:
        SystemExit: If there is no such extra.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        sys.exit(f"dependencies: pyproject.toml has no extra {unknown[0]!r}: {', '.join(optional)}")
    wanted = []
    if base:
        wanted += [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        wanted += optional[extra]
    return sorted(set(wanted))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of an entry; another process that wants it waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def entry(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of an entry, built first if it is missing.

    Args:
        cache: The folder of the cache.
        key: The name of the entry.
        build: Fills a new, empty folder. The entry is renamed to its place when it returns.
    """
    folder = cache / key
    with locked(cache / f"{key}.lock"):
        if not folder.is_dir():
            remove_unused(cache)
            part = cache / f"{key}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a build that was killed
            part.mkdir()
            build(part)
            (part / ORIGIN).write_text(str(part), encoding="utf-8")
            part.rename(folder)
        os.utime(folder / ORIGIN)
    return folder


def remove_unused(cache: Path) -> None:
    """Remove entries that nobody has asked for in ``KEPT_DAYS`` days."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for origin in cache.glob(f"*/{ORIGIN}"):
        if origin.stat().st_mtime < oldest:
            shutil.rmtree(origin.parent, ignore_errors=True)


def attach(folder: Path, source: Path, *, executables: str | None = None) -> None:
    """Copy an entry to where a clone wants it; files are hard links where the disk is the same.

    Args:
        folder: The copy. Files that are there already and have the same names are replaced.
        source: The entry.
        executables: The folder of scripts that name the path the entry was built at.
    """
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, symlinks=True, copy_function=link_or_copy)
    origin = (part / ORIGIN).read_text(encoding="utf-8")
    (part / ORIGIN).unlink()
    for script in (part / executables).iterdir() if executables else ():
        rewrite(script, origin, str(folder.absolute()))
    if folder.is_dir():
        shutil.copytree(part, folder, symlinks=True, copy_function=replace, dirs_exist_ok=True)
        shutil.rmtree(part)
    else:
        part.rename(folder)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where there cannot be one."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def replace(source: str, target: str) -> None:
    """Move a file over another."""
    os.replace(source, target)


def rewrite(script: Path, old: str, new: str) -> None:
    """Replace a path in a script by another; the file that it is a link of stays as it is."""
    if script.is_symlink() or not script.is_file():
        return
    content = script.read_bytes()
    if old.encode() in content:
        changed = script.with_name(f"{script.name}.new")
        changed.write_bytes(content.replace(old.encode(), new.encode()))
        shutil.copymode(script, changed)
        changed.replace(script)


def pip(python: Path | str, *arguments: str) -> None:
    """Run pip; its errors are shown.

    Raises:
        SystemExit: If it fails.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"dependencies: pip failed ({done.returncode}): {' '.join(arguments)}")


def venv(asked: argparse.Namespace) -> None:
    """Make or update a virtual environment, and install this clone's code into it."""
    folder: Path = asked.folder
    python = folder / "bin" / "python"
    if python.exists():
        update(asked, python)
        return
    wanted = wanted_of(asked)
    index = ["--extra-index-url", asked.index] if asked.index else []
    key = key_of("venv", wanted, asked.no_deps, asked.index, asked.compile)

    def build(part: Path) -> None:
        say(f"building {folder} ({len(wanted)} requirements); later clones take it from the cache")
        subprocess.run([sys.executable, "-m", "venv", part], check=True)
        made = part / "bin" / "python"
        # Compiling while installing takes one processor; below, all of them.
        pip(made, "install", "-q", "--no-compile", *index, *wanted)
        if asked.no_deps:
            pip(made, "install", "-q", "--no-compile", "--no-deps", *asked.no_deps)
        if asked.compile:
            compile_all(made, part)

    attach(folder, entry(cache_folder() / "dependencies", key, build), executables="bin")
    if asked.project:
        pip(python, "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def update(asked: argparse.Namespace, python: Path) -> None:
    """Bring an environment that exists to what is wanted; a torch that it has is kept."""
    index = ["--extra-index-url", asked.index] if asked.index else []
    extras = f"[{','.join(asked.extra)}]" if asked.extra else ""
    project = ["-e", f"{ROOT}{extras}"] if asked.project else []
    asked.extra, wanted = [], wanted_of(asked, base=False)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        kept = wanted
    else:
        kept = [one for one in wanted if not one.startswith("torch==")]
    pip(python, "install", "-q", "--no-compile", *index, *kept, *project)
    if asked.no_deps:
        pip(python, "install", "-q", "--no-compile", "--no-deps", *asked.no_deps)
    if asked.compile:
        compile_all(python, python.parent.parent)


def compile_all(python: Path, folder: Path) -> None:
    """Compile what is installed: a compiler's warning about it would fail a test."""
    options = ["-W", "ignore", "-m", "compileall", "-qq", "-j", "0"]
    subprocess.run([python, *options, folder / "lib"], capture_output=True, check=False)


def wheels(asked: argparse.Namespace) -> None:
    """Fetch wheels and sdists into a folder, to install from without a network."""
    wanted = wanted_of(asked)
    key = key_of("wheels", wanted, asked.sdist, asked.index)

    def build(part: Path) -> None:
        say(f"fetching what tests install offline ({len(wanted)} requirements)")
        index = ["--extra-index-url", asked.index] if asked.index else []
        download = ["download", "-q", "-d", str(part)]
        pip(sys.executable, *download, "--only-binary", ":all:", *index, *wanted)
        for one in asked.sdist:
            sdists = ["-d", str(part / "sdists"), "--no-deps", "--no-binary", one, one]
            pip(sys.executable, "download", "-q", *sdists)

    attach(asked.folder, entry(cache_folder() / "dependencies", key, build))


def wanted_of(asked: argparse.Namespace, *, base: bool = True) -> list[str]:
    """Return all requirements that were asked for, one line each, sorted."""
    wanted = requirements_of(ROOT, asked.extra, base=base and asked.project)
    for path in asked.requirements:
        lines = (line.split("#")[0].strip() for line in path.read_text("utf-8").splitlines())
        wanted += [line for line in lines if line]
    return sorted({*wanted, *asked.also})


def say(progress: str) -> None:
    """Say on stderr what takes long."""
    print(f"dependencies: {progress}", file=sys.stderr, flush=True)


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    for name, function in (("venv", venv), ("wheels", wheels)):
        kind = kinds.add_parser(name, help=str(function.__doc__).splitlines()[0])
        kind.set_defaults(function=function)
        kind.add_argument("folder", type=Path)
        kind.add_argument("also", nargs="*", metavar="REQUIREMENT")
        kind.add_argument("--extra", action="append", default=[], help="of pyproject.toml")
        kind.add_argument("--requirements", action="append", default=[], type=Path)
        kind.add_argument("--index", default="", help="a further package index")
        kind.add_argument(
            "--without-project", dest="project", action="store_false", help="not this package"
        )
        if name == "venv":
            kind.add_argument("--no-deps", action="append", default=[], metavar="REQUIREMENT")
            kind.add_argument("--compile", action="store_true", help="all Python files, now")
        else:
            kind.add_argument("--sdist", action="append", default=[], metavar="REQUIREMENT")
    return parser


if __name__ == "__main__":
    asked = arguments().parse_args()
    asked.function(asked)
