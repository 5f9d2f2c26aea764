"""Virtual environments made for a set of requirements, once for a machine's user.

Takes: requirements as pip takes them, and a Python. Gives: the folder of a venv that has them.
Never: gives out one that pip did not finish, or makes one twice because two processes ask at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollart_core.errors import ConfigError, PluginError, first_line

_PIP_S = 1800.0
_PIP_WITH_PYTHON = 23
"""First pip that installs into another Python's venv as a matter of course (``--python``)."""
_DONE = "rollart-made"
"""File in a venv that pip finished."""


def venvs_folder() -> Path:
    """Return where venvs are kept: ``rollart/venvs`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rollart" / "venvs"


def made_venv(requires: Sequence[str], python: str | None = None) -> Path:
    """Return a venv that has the requirements; the first time it is made.

    Args:
        requires: Requirement specifiers, wheels or project folders; pip's environment variables
            (``PIP_NO_INDEX``, ``PIP_FIND_LINKS``) say where the rest comes from.
        python: What it is made from; None: this Python.

    Raises:
        UserError: When pip cannot install them; says why.
    """
    base = shutil.which(python or sys.executable)
    if base is None:
        raise ConfigError(f"isolation.python: {python!r} is no program; name an interpreter")
    folder = venvs_folder() / _key(requires, base)
    if (folder / _DONE).is_file():
        return folder
    with _locked(folder.with_suffix(".lock")):
        if not (folder / _DONE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, requires, base)
    return folder


def _key(requires: Sequence[str], base: str) -> str:
    version = _run([base, "-c", "import sys; print(sys.version)"], "isolation.python")
    said = [os.path.realpath(base), version, sorted((r, _stamp(r)) for r in requires)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]


def _stamp(requirement: str) -> list[int]:
    """Return what changes when a local requirement does: the newest time in it, and its size."""
    path = Path(requirement).expanduser()
    if os.sep not in requirement or not path.exists():
        return []
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    kept = [p.stat() for p in files if not {"build", ".git", "__pycache__"} & set(p.parts)]
    return [max((s.st_mtime_ns for s in kept), default=0), sum(s.st_size for s in kept)]


def _make(folder: Path, requires: Sequence[str], base: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        given = [str(Path(r).expanduser()) if r.startswith("~") else r for r in requires]
        pip = _new(folder, base)
        _run([*pip, "install", "--no-input", "--quiet", *given], "isolation.requires")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _DONE).write_text(json.dumps({"requires": list(requires), "python": base}) + "\n")


def _new(folder: Path, base: str) -> list[str]:
    """Make an empty venv; return the pip that installs into it: the base's, where it can.

    A venv with a pip of its own takes seconds more to make.
    """
    python = str(folder / "bin" / "python")
    asked = [base, "-c", "import pip; print(pip.__version__.split('.')[0])"]
    said = subprocess.run(asked, capture_output=True, timeout=_PIP_S, check=False).stdout.strip()
    bare = ["--without-pip"] if said.isdigit() and int(said) >= _PIP_WITH_PYTHON else []
    _run([base, "-m", "venv", *bare, str(folder)], "isolation.requires")
    if bare:
        return [base, "-m", "pip", "--disable-pip-version-check", "--python", python]
    return [python, "-m", "pip", "--disable-pip-version-check"]


def _run(argv: Sequence[str], key: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PIP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise PluginError(f"{key}: {argv[0]} cannot be run: {first_line(str(e))}") from e
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.upper().startswith("ERROR")] or said[-1:]
        why = first_line(errors[-1]) if errors else f"exit code {done.returncode}"
        raise PluginError(f"{key}: {why}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
