"""Commands in fresh virtual environments: nothing of ours leaks in, and nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path

OUTSIDE = ("PYTHON", "ROLLART", "PIP_", "VIRTUAL_ENV")


def clean_environ() -> dict[str, str]:
    """Return this process's environment without what points at Python code or package indices."""
    return {k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)}


def offline(wheelhouse: Path) -> dict[str, str]:
    """Return variables by which pip, and the builds it starts, see nothing but the wheelhouse."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheelhouse),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def sh(
    *command: str | Path, cwd: Path | None = None, extra: Mapping[str, str] | None = None
) -> str:
    """Run a command, without the environment's Python paths; return its stdout."""
    env = {**clean_environ(), **(extra or {})}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh_venv(folder: Path, wheelhouse: Path, *requirements: str | Path) -> Path:
    """Make a virtual environment with these requirements, all from the wheelhouse."""
    venv.create(folder, with_pip=True)
    install = (folder / "bin/python", "-m", "pip", "install", "-q")
    sh(*install, *requirements, extra=offline(wheelhouse))
    return folder
