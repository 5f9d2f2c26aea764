"""``rollart build``: the image in which an environment runs with ``isolation: docker``.

Takes: an id or a project folder, and options of the build. Gives: the names of the image. Never:
builds itself; ``isolation/image.py`` does, with the ``docker`` command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollart_core.cli.output import print_json
from rollart_sandboxes.isolation.image import Build, build_image, find_project


def build(
    target: Annotated[
        str, typer.Argument(metavar="ID|PATH", help="An installed id, or a project folder.")
    ],
    tag: Annotated[
        list[str] | None, typer.Option(help="Name of the image; none: after the environment's id.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="The Dockerfile; none: the one in the project.")
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An ARG of the Dockerfile, such as BASE=..."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Docker's network for the steps, such as none.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")
    ] = False,
) -> None:
    """Build the image of an environment from its project's Dockerfile."""
    project = find_project(target)
    how = Build(tuple(tag or ()), file, tuple(build_arg or ()), network)
    tags = build_image(project, how, lambda line: typer.echo(line, err=as_json))
    if as_json:
        print_json({"images": list(tags), "folder": str(project.folder), "ids": list(project.ids)})
        return
    typer.echo(f"Built {', '.join(tags)}. A run uses it by: env: {{id: ..., isolation: docker}}")
