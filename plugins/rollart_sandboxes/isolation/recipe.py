"""The contents of an isolated environment's sandbox: its type, the files it can read, its Python.

A virtual environment is created for a set of requirements, once per user of a machine. It is never
used before pip has finished it, and never created twice if two processes request it concurrently.

Takes: an :class:`Isolation`. Gives: a :class:`Recipe`. Never: starts a sandbox. It does run the
Python that is bind-mounted into one, to find its packages, and pip if a venv is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollart_core.contracts.spec import ID_PATTERN
from rollart_core.errors import ConfigError, PluginError, UserError, first_line
from rollart_core.plugins import registry
from rollart_sandboxes.isolation.config import Isolation

_ASK_S = 60.0
_ASK = """
import json, sys
found = [sys.prefix, sys.base_prefix, *sys.path]
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", None))
    found += (getattr(module, "MAPPING", None) or {}).values()
print(json.dumps({"python": sys.executable, "version": sys.version_info[:2], "paths": found}))
"""
"""Prints the paths of a Python and its packages; setuptools' editable installs have a MAPPING."""
_ALREADY = ("/usr", "/bin", "/lib", "/lib64")
"""Paths that every bubblewrap sandbox has."""

_PIP_S = 1800.0
_PIP_WITH_PYTHON = 23
"""First pip version that reliably installs into another Python's venv (``--python``)."""
_DONE = "rollart-made"
"""Marker file in a venv that pip has finished."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of a sandbox for an isolated environment."""

    isolation: Isolation
    python: str
    """The interpreter, as a path in the sandbox."""
    needs: dict[str, Any] = field(default_factory=dict)
    """Options of the sandbox that follow from the recipe."""
    hint: str = ""
    """How to fix a sandbox that does not start."""

    @property
    def key(self) -> str:
        """Equal for sandboxes that are interchangeable."""
        given = self.isolation.model_dump(mode="json")
        return json.dumps([given, self.python, self.needs], sort_keys=True)


def recipe_of(isolation: Isolation, env_id: str) -> Recipe:
    """Return the recipe of a sandbox for this environment; may take as long as pip does.

    Raises:
        UserError: If the Python or venv does not exist, or the venv cannot be created.
    """
    if isolation.kind == "docker":
        return _container(isolation, env_id)
    python = _python(isolation)
    if isolation.kind == "venv":
        return Recipe(isolation, python)
    itself, outside = _outside(python)
    binds = [*isolation.options.get("ro_binds", ()), *outside]
    return Recipe(isolation, itself, {"ro_binds": list(dict.fromkeys(binds))})


def image_of(env_id: str) -> str:
    """Return the name of the image that ``rollart build`` builds for an environment.

    Raises:
        ConfigError: If the id cannot be an image name.
    """
    match = ID_PATTERN.match(env_id)
    if match is None:
        raise ConfigError(
            f"{env_id} is not an id of the form namespace/Name-vN, so it has no default image: "
            "set isolation.image"
        )
    name = f"{match['namespace']}-{match['name']}".lower()
    return f"rollart-env/{name}:v{match['version']}"


def _container(isolation: Isolation, env_id: str) -> Recipe:
    python = isolation.python or "python3"
    needs: dict[str, Any] = {}
    if isolation.python is not None:
        needs["python"] = isolation.python
    if "image" in isolation.options:
        return Recipe(isolation, python, needs)
    env_id = _full_id(env_id)
    needs["image"] = image_of(env_id)
    hint = f"`rollart build {env_id}` makes the image {needs['image']}, or set isolation.image"
    return Recipe(isolation, python, needs, hint)


def _full_id(env_id: str) -> str:
    """Return the id of an alias, if the environment is installed here too."""
    try:
        return env_id if ":" in env_id else registry.find("environments", env_id).key
    except UserError:
        return env_id


def _python(isolation: Isolation) -> str:
    if isolation.requires:
        made = made_venv(isolation.requires, isolation.python)
        return str(made / "bin" / "python")
    if isolation.venv is None:
        return _found(isolation.python) if isolation.python else sys.executable
    folder = Path(isolation.venv).expanduser().absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"isolation.venv: {folder} is not a virtual environment (no bin/python)")
    return str(python)


def _found(python: str) -> str:
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"isolation.python: {python!r} is not a program: set an interpreter")
    return str(Path(found).absolute())


@cache
def _outside(python: str) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter, and the paths of it and its packages that a sandbox does not have."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
        said = json.loads(done.stdout)
    except subprocess.CalledProcessError as e:
        raise PluginError(f"{python} does not run: {first_line(e.stderr[-300:])}") from e
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        raise PluginError(f"{python} does not run as a Python: {first_line(str(e))}") from e
    if tuple(said["version"]) < (3, 8):
        raise PluginError(f"{python} is Python {said['version']}: the env server needs 3.8+")
    # A venv's python is a link that locates the venv by its own path: both ends are needed.
    files = (said["python"], str(Path(said["python"]).resolve()))
    whole = {str(Path(p).absolute()) for p in (*files, *said["paths"]) if p and Path(p).exists()}
    wanted = {p for p in whole if p != "/" and not _below(p, _ALREADY)}
    return said["python"], tuple(sorted(p for p in wanted if not _below(p, wanted - {p})))


def _below(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}/") for other in others)


def venvs_folder() -> Path:
    """Return the folder of venvs: ``rollart/venvs`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rollart" / "venvs"


def made_venv(requires: Sequence[str], python: str | None = None) -> Path:
    """Return a venv that has the requirements; it is created the first time.

    Args:
        requires: Requirement specifiers, wheels or project folders. pip's environment variables
            (``PIP_NO_INDEX``, ``PIP_FIND_LINKS``) define where other packages come from.
        python: The Python that creates it; if None, this Python.

    Raises:
        UserError: If pip cannot install them, with the reason.
    """
    base = shutil.which(python or sys.executable)
    if base is None:
        raise ConfigError(f"isolation.python: {python!r} is not a program: set an interpreter")
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
    """Return what changes with a local requirement: its newest file time, and its size."""
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
    """Create an empty venv; return the pip command that installs into it, the base's if possible.

    A venv with its own pip takes seconds longer to create.
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
