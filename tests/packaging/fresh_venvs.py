"""Commands in fresh virtual environments: nothing of ours leaks in, and nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def pip_install(folder: Path, wheelhouse: Path, *arguments: str | Path) -> None:
    """Install into a virtual environment, which needs no pip, from the wheelhouse.

    What is installed is compiled when it is imported: most of it never is.
    """
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    sh(*pip, "install", "-q", "--no-compile", *arguments, extra=offline(wheelhouse))


def fresh_venv(folder: Path, wheelhouse: Path, *requirements: str | Path) -> Path:
    """Make a virtual environment with these requirements, all from the wheelhouse."""
    venv.create(folder)
    pip_install(folder, wheelhouse, *requirements)
    return folder


def linked_venv(folder: Path, wheel: Path, extra: str, *others: str) -> Path:
    """Make a virtual environment for a wheel, of links to what is installed here.

    It holds the distributions that the wheel's requirements need, and no others: a requirement
    that the wheel does not name is missing in it as in one that pip made. Nothing is unpacked or
    compiled a second time. The wheel itself is not in it.

    Args:
        folder: Where to make it.
        wheel: Whose requirements to link.
        extra: The wheel's extra to link the requirements of.
        others: Further requirements.
    """
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (about,) = (p for p in zipfile.Path(wheel).iterdir() if p.name.endswith(".dist-info"))
    requirements = PathDistribution(about).requires or []
    for found in needed([*requirements, *others], extra):
        _link_files(found, site)
        _write_scripts(found, folder / "bin")
    return folder


def needed(requirements: Iterable[str], extra: str) -> list[Distribution]:
    """Return the installed distributions that requirements need, also by way of others."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(text), extra) for text in requirements]
    while left:
        one, asked = left.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": asked}):
            continue
        name = canonicalize_name(one.name)
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            pytest.fail(f"{one} is needed, and is not installed here")
        for wanted in {"", *one.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                left += [(Requirement(more), wanted) for more in found[name].requires or ()]
    return list(found.values())


def _link_files(found: Distribution, site: Path) -> None:
    """Link the files of a distribution, and what Python has compiled of them."""
    for path in found.files or ():
        if path.parts[0] == "..":  # programs and manual pages
            continue
        _link(Path(str(found.locate_file(path))), site / path)
        if path.suffix == ".py":
            compiled = cache_from_source(path)
            _link(Path(str(found.locate_file(compiled))), site / compiled)


def _link(source: Path, target: Path) -> None:
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        target.symlink_to(source)


def _write_scripts(found: Distribution, folder: Path) -> None:
    """Write the programs of a distribution, for the Python that is in the folder."""
    for entry in found.entry_points.select(group="console_scripts"):
        script = folder / entry.name
        code = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
        script.write_text(f"#!{folder / 'python'}\n{code}")
        script.chmod(0o755)


def lend(folder: Path) -> None:
    """Put this environment's packages behind those of a virtual environment."""
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"])
