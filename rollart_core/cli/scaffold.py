"""A package from its template, whole or not at all.

Takes: the names, and the folder to put it in. Gives: the new folder. Never: writes over anything,
or leaves a half-made package: it is rendered beside its place and renamed when it is whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from rollart_core.cli.package_names import Kind, PackageName
from rollart_core.errors import UserError, first_line


@dataclass(frozen=True, slots=True)
class Wording:
    """What a person may want to say of the package; plain text of one line."""

    author: str
    summary: str


def template(kind: Kind) -> Path:
    """Return the folder of a kind's template: in the wheel beside this file, or in the checkout."""
    here = Path(__file__).resolve()
    shipped = here.parent / "cookiecutter"
    root = shipped if shipped.is_dir() else here.parents[2] / "cookiecutter"
    return root if kind == "env" else root / kind


def refuse_path(name: PackageName, output: Path) -> None:
    """Refuse a place where something lies already.

    Raises:
        UserError: When the target exists, or the folder around it does not.
    """
    if not output.is_dir():
        raise UserError(f"there is no folder {output}: make it, or give another with --output")
    target = output / name.slug
    if os.path.lexists(target):
        raise UserError(
            f"{target} exists and is never written over: move it away, choose another name, or "
            "give another folder with --output"
        )


def render(name: PackageName, wording: Wording, output: Path) -> Path:
    """Make the package ``output/<slug>`` and return that folder.

    Raises:
        UserError: When there is something already, or it cannot be written.
    """
    refuse_path(name, output)
    target = output / name.slug
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name.slug}-", dir=output) as folder:
            _generate(name, wording, Path(folder))
            refuse_path(name, output)  # again: rename would replace an empty folder
            (Path(folder) / name.slug).rename(target)
    except OSError as e:
        raise UserError(f"{target} cannot be made: {first_line(str(e))}") from e
    return target


def _generate(name: PackageName, wording: Wording, folder: Path) -> None:
    from cookiecutter.generate import generate_files

    # Not cookiecutter's main(): that reads and writes files in the home folder.
    context = {"cookiecutter": _context(name, wording)}
    generate_files(template(name.kind), context, output_dir=folder, accept_hooks=False)
    for cached in folder.rglob("__pycache__"):
        shutil.rmtree(cached)


def _context(name: PackageName, wording: Wording) -> dict[str, str]:
    installed = Version(version("rollart"))
    return {
        "slug": name.slug,
        "module": name.module,
        "namespace": name.namespace,
        "name": name.name,
        "id": name.plugin_id,
        "alias": name.slug,
        "base": name.base,
        "class_name": name.class_name,
        "author": _one_line(wording.author),
        "summary": _one_line(wording.summary),
        "year": str(datetime.now(tz=UTC).year),
        # Before 1.0.0 a minor version may change a contract.
        "rollart_pin": f">={installed.base_version},<{_next_breaking(installed)}",
    }


def _next_breaking(installed: Version) -> str:
    if installed.major:
        return str(installed.major + 1)
    return f"0.{installed.minor + 1}"


def _one_line(text: str) -> str:
    """Return text that may stand between double quotes in TOML, YAML and Python."""
    return " ".join(text.replace("\\", "/").replace('"', "'").split())
