"""From what a person names, a project folder or a wheel, to a wheel.

Takes: a path. Gives: the wheel's path. Never: fetches a build backend, or builds inside of the
project, where an old ``build/`` folder would get into the wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Final

from rollart_core.errors import RegistryError

_LEFT_OUT: Final = (".*", "build", "dist", "*.egg-info", "venv", "runs")


def wheel_of(path: Path, work: Path) -> Path:
    """Return the wheel at ``path``, built if it is a project.

    Args:
        path: A ``.whl`` file or a folder with a ``pyproject.toml``.
        work: An empty folder to build in.

    Raises:
        RegistryError: When it is neither, or cannot be built.
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
