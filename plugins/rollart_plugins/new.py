"""``rollart new-env`` and the like: create a plugin package that passes its own tests.

Takes: a name, an id, an author and a summary. Gives: a folder, and the next commands. Never:
overwrites anything, uses a name that is taken, or leaves an incomplete package: it is rendered in a
temporary folder next to the target and renamed when it is complete.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer
from packaging.version import Version

from rollart_core.cli.output import print_json
from rollart_core.errors import UserError, did_you_mean, first_line
from rollart_plugins.package_names import Kind, PackageName, name_package, refuse_taken

Name = Annotated[str, typer.Argument(help="Your team and a topic, such as acme-maze.")]
Id = Annotated[
    str | None, typer.Option("--id", help="namespace/Name-vN. Default: derived from the name.")
]
Output = Annotated[Path, typer.Option(help="The folder in which to create the package.")]
NonInteractive = Annotated[
    bool, typer.Option("--non-interactive", help="Use the defaults without prompting.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object without prompting.")]

_ENV_KINDS: Final[Mapping[str, Kind]] = {"step": "env", "tool": "tool", "agent": "agent"}
_SUMMARIES: Final[Mapping[Kind, str]] = {
    "env": "Find the way out of a maze.",
    "tool": "Look up the team of a person with a tool.",
    "agent": "Find a hidden number by asking.",
    "reward": "The fewer turns, the better.",
    "algorithm": "Each member of a group against the mean of the others.",
    "mapper": "Engines where memory is fastest, the trainer where arithmetic is.",
}


def new_env(
    name: Name,
    kind: Annotated[
        str,
        typer.Option(
            help="step: has reset() and step(). tool: has tools, which the policy calls. "
            "agent: a program with its own loop."
        ),
    ] = "step",
    plugin_id: Id = None,
    output: Output = Path(),
    non_interactive: NonInteractive = False,
    as_json: Json = False,
) -> None:
    """Create a package with an environment, its tests and an example run config."""
    if kind not in _ENV_KINDS:
        near = did_you_mean(kind, tuple(_ENV_KINDS))
        raise UserError(f"--kind {kind!r} is not one of {', '.join(_ENV_KINDS)}.{near}")
    named = _named(_ENV_KINDS[kind], name, plugin_id, output)
    _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)


def _command(kind: Kind, help_text: str) -> Callable[..., None]:
    """Return the command that creates packages of a kind."""

    def command(
        name: Name,
        plugin_id: Id = None,
        output: Output = Path(),
        non_interactive: NonInteractive = False,
        as_json: Json = False,
    ) -> None:
        named = _named(kind, name, plugin_id, output)
        _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)

    command.__doc__ = help_text
    return command


new_reward = _command("reward", "Create a package with a reward function and its tests.")
new_algorithm = _command("algorithm", "Create a package with a training algorithm and its tests.")
new_mapper = _command("mapper", "Create a package with a hardware mapper and its tests.")


def _named(kind: Kind, name: str, plugin_id: str | None, output: Path) -> PackageName:
    named = name_package(kind, name, plugin_id)
    refuse_path(named, output)
    refuse_taken(named)
    return named


def _make(name: PackageName, output: Path, *, asks: bool, as_json: bool) -> None:
    wording = Wording(author=name.namespace, summary=_SUMMARIES[name.kind])
    if asks and sys.stdin.isatty():
        name = _ask_id(name)
        wording = Wording(
            author=typer.prompt("Author", default=wording.author),
            summary=typer.prompt("Summary, in one sentence", default=wording.summary),
        )
    folder = render(name, wording, output)
    ids = {kind: plugin_id for kind, (plugin_id, _) in name.specs.items()}
    if as_json:
        print_json({"path": str(folder), "module": name.module, "ids": ids})
        return
    typer.echo(f"Made {folder} with {' and '.join(ids.values())}. Now:\n")
    for line in _next_steps(name, folder):
        typer.echo(f"    {line}")


def _ask_id(name: PackageName) -> PackageName:
    while True:
        given = typer.prompt("Id", default=name.plugin_id)
        try:
            chosen = name_package(name.kind, name.slug, given)
            refuse_taken(chosen)
        except UserError as e:
            typer.echo(str(e), err=True)
        else:
            return chosen


def _next_steps(name: PackageName, folder: Path) -> list[str]:
    example = folder / "example.yaml"
    install, check = f"pip install -e '{folder}[dev]'", f"rollart check {name.plugin_id}"
    run = [f"rollart run {example}"] if example.is_file() else []
    return [install, f"pytest {folder}", check, *run]


@dataclass(frozen=True, slots=True)
class Wording:
    """Author and summary of the package, each plain text of one line."""

    author: str
    summary: str


def template(kind: Kind) -> Path:
    """Return the template folder of a kind: next to this file in the wheel, or in the checkout."""
    here = Path(__file__).resolve()
    shipped = here.parent / "cookiecutter"
    root = shipped if shipped.is_dir() else here.parents[2] / "cookiecutter"
    return root if kind == "env" else root / kind


def refuse_path(name: PackageName, output: Path) -> None:
    """Reject a target that exists.

    Raises:
        UserError: If the target exists, or its parent folder does not.
    """
    if not output.is_dir():
        raise UserError(f"there is no folder {output}: create it, or give another with --output")
    target = output / name.slug
    if os.path.lexists(target):
        raise UserError(
            f"{target} exists and is never overwritten: move it away, choose another name, or "
            "give another folder with --output"
        )


def render(name: PackageName, wording: Wording, output: Path) -> Path:
    """Create the package ``output/<slug>`` and return that folder.

    Raises:
        UserError: If the target exists, or cannot be written.
    """
    refuse_path(name, output)
    target = output / name.slug
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name.slug}-", dir=output) as folder:
            _generate(name, wording, Path(folder))
            refuse_path(name, output)  # again: rename would replace an empty folder
            (Path(folder) / name.slug).rename(target)
    except OSError as e:
        raise UserError(f"{target} cannot be created: {first_line(str(e))}") from e
    return target


def _generate(name: PackageName, wording: Wording, folder: Path) -> None:
    from cookiecutter.generate import generate_files

    # cookiecutter's main() would read and write files in the home folder.
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
    """Return text that is valid between double quotes in TOML, YAML and Python."""
    return " ".join(text.replace("\\", "/").replace('"', "'").split())
