"""``rollart new-env`` and its kin: a new plugin package that passes its own tests.

Takes: a name, an id, words about it. Gives: a folder, and what to type next. Never: writes over
anything, or takes a name that is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from rollart_core.cli.output import print_json
from rollart_core.cli.package_names import Kind, PackageName, name_package, refuse_taken
from rollart_core.cli.scaffold import Wording, refuse_path, render
from rollart_core.errors import UserError, did_you_mean

Name = Annotated[str, typer.Argument(help="Such as acme-maze: your team, then what it is.")]
Id = Annotated[
    str | None, typer.Option("--id", help="namespace/Name-vN; made from the name when left out.")
]
Output = Annotated[Path, typer.Option(help="The folder to put it in.")]
NonInteractive = Annotated[
    bool, typer.Option("--non-interactive", help="Ask nothing, take the defaults.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and ask nothing.")]

_ENV_KINDS: Final[Mapping[str, Kind]] = {"step": "env", "agent": "agent"}
_SUMMARIES: Final[Mapping[Kind, str]] = {
    "env": "Find the way out of a maze.",
    "agent": "Find a hidden number by asking.",
    "reward": "The fewer turns, the better.",
    "algorithm": "Each member of a group against the mean of the others.",
    "mapper": "Engines where memory is fastest, the trainer where arithmetic is.",
}


def new_env(
    name: Name,
    kind: Annotated[
        str, typer.Option(help="step: reset and step. agent: a program that owns its loop.")
    ] = "step",
    plugin_id: Id = None,
    output: Output = Path(),
    non_interactive: NonInteractive = False,
    as_json: Json = False,
) -> None:
    """Make a package with an environment, its tests and an example run."""
    if kind not in _ENV_KINDS:
        near = did_you_mean(kind, tuple(_ENV_KINDS))
        raise UserError(f"--kind {kind!r} is not one of {', '.join(_ENV_KINDS)}.{near}")
    named = _named(_ENV_KINDS[kind], name, plugin_id, output)
    _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)


def new_reward(
    name: Name,
    plugin_id: Id = None,
    output: Output = Path(),
    non_interactive: NonInteractive = False,
    as_json: Json = False,
) -> None:
    """Make a package with a reward function and its tests."""
    named = _named("reward", name, plugin_id, output)
    _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)


def new_algorithm(
    name: Name,
    plugin_id: Id = None,
    output: Output = Path(),
    non_interactive: NonInteractive = False,
    as_json: Json = False,
) -> None:
    """Make a package with a training algorithm and its tests."""
    named = _named("algorithm", name, plugin_id, output)
    _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)


def new_mapper(
    name: Name,
    plugin_id: Id = None,
    output: Output = Path(),
    non_interactive: NonInteractive = False,
    as_json: Json = False,
) -> None:
    """Make a package with a hardware mapper and its tests."""
    named = _named("mapper", name, plugin_id, output)
    _make(named, output, asks=not (non_interactive or as_json), as_json=as_json)


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
            summary=typer.prompt("What it is, in a sentence", default=wording.summary),
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
    install = f"pip install -e '{folder}[dev]'"
    if name.kind in _ENV_KINDS.values():
        check = f"rollart check {name.plugin_id}"
        return [install, f"pytest {folder}", check, f"rollart run {folder}/example.yaml"]
    return [install, f"pytest {folder}", f"rollart info {name.plugin_id}"]
