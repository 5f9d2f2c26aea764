"""What a box of an isolation is made of: sandbox, files it may read, and the Python that runs.

Takes: an :class:`Isolation`. Gives: a :class:`Recipe`. Never: starts a box; it does run the Python
that is to be bound into one, to learn where its packages lie, and pip, where a venv is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollart_core.contracts.spec import ID_PATTERN
from rollart_core.errors import ConfigError, PluginError, UserError, first_line
from rollart_core.plugins import registry
from rollart_sandboxes.isolation.config import Isolation
from rollart_sandboxes.isolation.venv import made_venv

_ASK_S = 60.0
_ASK = """
import json, sys
found = [sys.prefix, sys.base_prefix, *sys.path]
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", None))
    found += (getattr(module, "MAPPING", None) or {}).values()
print(json.dumps({"python": sys.executable, "version": sys.version_info[:2], "paths": found}))
"""
"""Says where a Python and all it can import lie; setuptools' editable installs have a MAPPING."""
_ALREADY = ("/usr", "/bin", "/lib", "/lib64")
"""What a bubblewrap box has anyway."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A box of an isolation."""

    isolation: Isolation
    python: str
    """The interpreter, as a path in the box."""
    needs: dict[str, Any] = field(default_factory=dict)
    """Options of the box that follow from it."""
    hint: str = ""
    """What to do when the box does not start."""

    @property
    def key(self) -> str:
        """Equal for boxes that can stand in for one another."""
        given = self.isolation.model_dump(mode="json")
        return json.dumps([given, self.python, self.needs], sort_keys=True)


def recipe_of(isolation: Isolation, env_id: str) -> Recipe:
    """Return what a box for this environment is made of; may take as long as pip does.

    Raises:
        UserError: When there is no such Python or venv, or it cannot be made.
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
    """Return the name of the image that ``rollart build`` makes for an environment.

    Raises:
        ConfigError: When it has no id that could be a name.
    """
    match = ID_PATTERN.match(env_id)
    if match is None:
        raise ConfigError(
            f"{env_id} is no id of the form namespace/Name-vN, after which its image would be "
            "named: set isolation.image"
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
    """Return the id that an alias stands for, where the environment is installed here too."""
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
        raise ConfigError(f"isolation.venv: {folder} is no virtual environment (no bin/python)")
    return str(python)


def _found(python: str) -> str:
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"isolation.python: {python!r} is no program; name an interpreter")
    return str(Path(found).absolute())


@cache
def _outside(python: str) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter itself, and what holds it and its packages, less what a box has."""
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
        raise PluginError(f"{python} is Python {said['version']}; the env server needs 3.8")
    # A venv's python is a link, by whose place it knows that it is one: both ends are needed.
    files = (said["python"], str(Path(said["python"]).resolve()))
    whole = {str(Path(p).absolute()) for p in (*files, *said["paths"]) if p and Path(p).exists()}
    wanted = {p for p in whole if p != "/" and not _below(p, _ALREADY)}
    return said["python"], tuple(sorted(p for p in wanted if not _below(p, wanted - {p})))


def _below(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}/") for other in others)
